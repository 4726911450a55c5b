"""How the workers of a host share its cores, step by step: decode first.

Decode keeps clients waiting at every token, and a few of the cores give it all the memory bandwidth
there is; prefill can use whatever is left, and all of it. So decode is urgent and prefill yields:

- A prefill step runs on every core that no urgent thread has. Its helpers look before each piece of
  their work, some tens of microseconds long, and leave when they are in the way. Without that they
  would be put aside by the kernel with a piece in hand, and hold up their whole step.
- A decode step says that it comes, waits until helpers that are in the way have handed their piece
  in, and computes. It takes all cores while it is alone; while others compute it divides them.
- While prompts have been computed without a break for a while, decode pauses after each step for as
  long as the step took: tokens come slower, and prompts that are long or wait in line come much
  sooner. Without it, two or three sequences would hold a core that reads all weights for each of
  their tokens, and the more prompts waited, the fewer sequences would share that.

Whatever is short goes before all of these: the event loop, gRPC's threads, those that copy blocks.
Threads that compute have a nice value of their own for that; without it the kernel leaves them on
their core until its next tick, 4 ms later, once the event loop has used what it was owed.

``worker/cores/core_board.py`` applies these rules. The simulator has the same times.
"""

from __future__ import annotations

PATIENCE_S = 0.15
"""How long prefill computes without a break before decode pauses for it."""
BREAK_S = 0.005
"""Less than that between two steps is no break."""
