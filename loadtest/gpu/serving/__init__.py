"""Does it serve: real workers and routers on one device, killed and poisoned."""
