"""Makes docs/reference/grpc.md from proto/: services, methods, messages and their comments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

from router.access.access import scope_of_service
from tools.reference.markdown import ROOT, anchor, cell, code, made_from, table, text

_PUBLIC = ("InferenceService", "TokenService", "OperatorService", "WorkerOperatorService")
"""Names of the services that the public gRPC listener offers, in the order of the page."""
_PACKAGE = ".baton.v1."
_HEAD = f"""# gRPC API

The gRPC listener (`grpc` in the [configuration](configuration.md#grpc)) serves four services of
the package `baton.v1`, and also gRPC health checks and reflection. Their calls need an API key as
the HTTP API does, as metadata `authorization: Bearer KEY`; the deadline of a call bounds the
request. With an [`admin_http`](configuration.md#admin_http) address the services for operators
are not served here.

Errors have the code of [the HTTP API](errors.md) in the trailer `baton-code`. [Chat, completions
and embeddings](http-api.md) lists which fields of HTTP requests are here, too.

{made_from("the files in `proto/baton/v1`, with their comments,")}
"""
_INSIDE = """
## Within the cluster

Routers and workers call each other by these services. They are no interface for clients: all
processes of a cluster run the same version, and messages may change with any version.
"""
_TYPES = {
    number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()
}
Comments = dict[str, str]


def reference() -> str:
    """Return the Markdown text of the page on the gRPC API."""
    files, comments = _sources()
    services = {one.name: one for file in files.file for one in file.service}
    messages = {one.name: one for file in files.file for one in file.message_type}
    enums = {one.name: one for file in files.file for one in file.enum_type}
    reached: list[str] = []
    parts = [_HEAD]
    for name in _PUBLIC:
        scope = scope_of_service(f"baton.v1.{name}")
        parts.append(
            f"\n## {name}\n\n{text(comments.get(name, ''))} Scope of the key: `{scope}`.\n"
        )
        rows = [_method(name, one, comments) for one in services[name].method]
        parts.append(f"\n{table(('method', 'request', 'answer', 'what it does'), rows)}\n")
        for method in services[name].method:
            for kind in (method.input_type, method.output_type):
                _reach(kind, messages, reached)
    parts.append("\n## Messages\n")
    parts += (_message(messages[name], comments) for name in reached if name in messages)
    parts.append("\n## Enumerations\n")
    parts += (_enum(enums[name], comments) for name in reached if name in enums)
    parts.append(_INSIDE)
    inside = (
        (code(name), code(one.name), cell(comments.get(f"{name}.{one.name}", "")))
        for name, service in services.items()
        if name not in _PUBLIC
        for one in service.method
    )
    parts.append(f"\n{table(('service', 'method', 'what it does'), inside)}\n")
    return "".join(parts)


def _sources() -> tuple[FileDescriptorSet, Comments]:
    """Return the compiled files of proto/, and their comments by ``Message.field`` or
    ``Service.Method``."""
    program = Path(sys.executable).with_name("buf")
    built = subprocess.run(  # noqa: S603 - the compiler of the development tools
        [program, "build", "proto", "--exclude-imports", "--output", "-#format=binpb"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    files = FileDescriptorSet.FromString(built)
    comments: Comments = {}
    for file in files.file:
        for place in file.source_code_info.location:
            if place.leading_comments:
                comments[".".join(_names(file, list(place.path)))] = place.leading_comments
    return files, comments


def _names(file: Any, path: list[int]) -> Iterator[str]:
    """Yield the names of the elements along a path in a proto file. The path consists of field
    numbers and indices."""
    here = file
    while len(path) >= 2:
        field, index, *path = path
        here = getattr(here, here.DESCRIPTOR.fields_by_number[field].name)[index]
        yield here.name


def _reach(kind: str, messages: dict[str, Any], reached: list[str]) -> None:
    """Add the message type ``kind`` and the types of all its fields to ``reached``. The order is
    the one in which a reader of the page finds them."""
    name = kind.removeprefix(_PACKAGE)
    if not kind.startswith(_PACKAGE) or name in reached:
        return
    reached.append(name)
    for field in getattr(messages.get(name), "field", ()):
        if field.type_name:
            _reach(field.type_name, messages, reached)


def _method(service: str, method: Any, comments: Comments) -> tuple[str, ...]:
    streamed = (" (stream)" if method.client_streaming else "", method.server_streaming)
    return (
        code(method.name),
        f"{_type_link(method.input_type)}{streamed[0]}",
        f"{_type_link(method.output_type)}{' (stream)' if streamed[1] else ''}",
        cell(comments.get(f"{service}.{method.name}", "")),
    )


def _message(message: Any, comments: Comments) -> str:
    about = text(comments.get(message.name, ""))
    parts = [f"\n### {message.name}\n", f"\n{about}\n" if about else ""]
    nested = {one.name: one for one in message.nested_type}
    rows = [
        (
            f"{anchor(f'{message.name}.{field.name}')}{code(field.name)}",
            _field_type(message, field, nested),
            cell(comments.get(f"{message.name}.{field.name}", "")),
        )
        for field in message.field
    ]
    parts.append(f"\n{table(('field', 'type', 'meaning'), rows)}\n" if rows else "\nNo fields.\n")
    return "".join(parts)


def _field_type(message: Any, field: Any, nested: dict[str, Any]) -> str:
    entry = nested.get(field.type_name.rpartition(".")[2])
    if entry is not None and entry.options.map_entry:
        key, value = (_type_name(one) for one in entry.field)
        return f"map from {key} to {value}"
    kind = _type_name(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    if field.HasField("oneof_index"):
        return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return kind


def _type_name(field: Any) -> str:
    return _type_link(field.type_name) if field.type_name else _TYPES[field.type]


def _type_link(kind: str) -> str:
    name = kind.removeprefix(_PACKAGE)
    if kind.startswith(_PACKAGE):
        return f"[{code(name)}](#{name.lower()})"
    return code(kind.removeprefix("."))


def _enum(enum: Any, comments: Comments) -> str:
    about = text(comments.get(enum.name, ""))
    rows = (
        (code(one.name), str(one.number), cell(comments.get(f"{enum.name}.{one.name}", "")))
        for one in enum.value
    )
    shown = table(("value", "number", "meaning"), rows)
    return f"\n### {enum.name}\n" + (f"\n{about}\n" if about else "") + f"\n{shown}\n"
