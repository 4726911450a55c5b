def sub(p, *pairs):
    s=open(p).read()
    for a,b in pairs:
        assert a in s, (p,a)
        s=s.replace(a,b,1)
    open(p,'w').write(s)
sub('deploy/launcher/kernels.py',("Path(__file__).parent.parent","Path(__file__).parents[2]"))
sub('deploy/store/redis_users.py',('Path(__file__).with_name("redis") / "users.acl"','Path(__file__).parents[1] / "redis" / "users.acl"'))
sub('kvtransfer/memory/copying.py',('Path(__file__).parent / "native"','Path(__file__).parents[1] / "native"'))
for p in ('tests/unit/deploy/models/test_hub_model.py','tests/unit/deploy/models/test_model_store.py'):
    sub(p,('code = "import sys; from deploy.models.model_store import resolve; print(resolve(sys.argv[1], print))"','code = (\n        "import sys; from deploy.models.model_store import resolve;"\n        " print(resolve(sys.argv[1], print))"\n    )'))
sub('tools/config_reference.py',("`python -m tools.config_reference`; a test keeps the\ntwo equal.","`python -m tools.config_reference`; a test\nkeeps the two equal."))
sub('tools/metrics_reference.py',("`python -m tools.metrics_reference`; a test keeps the\ntwo equal.","`python -m tools.metrics_reference`; a test\nkeeps the two equal."))
sub('pyproject.toml',('"loadtest*", "deploy*"]','"loadtest*", "planning*", "deploy*"]'),('"loadtest", "deploy", "tools", "tests"]','"loadtest", "planning", "deploy", "tools", "tests"]'),('"loadtest.planner" = ["*.html"]','"planning.planner.report" = ["*.html"]'),('''    "loadtest",
    "deploy",
    "tools",
]
include_ext''','''    "loadtest",
    "planning",
    "deploy",
    "tools",
]
include_ext'''),('''    "loadtest",
    "router | prefill''','''    "loadtest",
    "planning",
    "router | prefill'''))
sub('.dockerignore',('!loadtest\n','!loadtest\n!planning\n'))
