"""A gRPC server without services, in a process that a test may stop. Prints its port."""

from __future__ import annotations

import asyncio

from baton.rpc.grpc_channel import make_server


async def main() -> None:
    server = make_server()
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)  # noqa: T201 - the test reads it
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
