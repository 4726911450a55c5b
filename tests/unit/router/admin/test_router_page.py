"""What a router measures for its page alone."""

from __future__ import annotations

import shutil
from pathlib import Path

from prometheus_client import CollectorRegistry

from baton.config.cluster import Config
from baton.security.expiry import expires_at
from baton.telemetry.metrics import RouterMetrics
from router.admin.router_page import router_page
from tests.support.certificates import Authority

LABELS = {"cluster": "blue", "model_name": "tiny"}


def test_the_disk_of_data_dir_before_it_exists(tmp_path: Path) -> None:
    config = Config(data_dir=str(tmp_path / "not" / "yet"))
    page = router_page(RouterMetrics(CollectorRegistry()), config, "blue", "tiny")
    total = page.get_sample_value("baton_data_disk_total_bytes", LABELS)
    free = page.get_sample_value("baton_data_disk_free_bytes", LABELS)
    assert total == shutil.disk_usage(tmp_path).total
    assert free is not None
    assert 0 < free <= total
    assert not (tmp_path / "not").exists()


def test_both_certificates(tmp_path: Path) -> None:
    """That of the listeners, and that which workers see."""
    authority = Authority(tmp_path)
    public = authority.sign("public", "router")
    config = Config(
        data_dir=str(tmp_path),
        tls={
            "folder": str(authority.folder),
            "certificate": str(public.certificate),
            "key": str(public.key),
        },
    )
    page = router_page(RouterMetrics(CollectorRegistry()), config, "blue", "tiny")
    for name in ("router.pem", "public.pem"):
        labels = LABELS | {"process": "router", "file": name}
        found = page.get_sample_value("baton_certificate_expiry_timestamp_seconds", labels)
        assert found == expires_at(authority.folder / name)
