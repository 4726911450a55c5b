"""How the workers of a host share its cores, step by step: decode first.

Each decode step delays a token for clients, and a few cores are enough to use the full memory
bandwidth. Prefill can use all the cores that are left. So decode is urgent and prefill yields:

- A prefill step runs on every core that has no urgent thread. Its helpers check the board before
  each piece of work, which takes some tens of microseconds, and leave if a decode step needs their
  core. Otherwise the kernel would suspend them in the middle of a piece, and delay the whole step.
- A decode step announces itself, waits until the helpers on its cores have finished their pieces,
  and computes. It takes all cores while it is alone, and shares them while other workers compute.
- If prompts have been computed for a while without a break, decode pauses after each step for as
  long as the step took. Tokens come more slowly, and long or waiting prompts finish much sooner.
  Without the pause, two or three sequences would occupy a core that reads all weights for each
  token. The more prompts waited, the fewer sequences would share that cost.

Short work has priority over all of these: the event loop, gRPC's threads, and threads that copy
blocks. So compute threads have a nice value of their own. Without it, the kernel may leave them on
their core until its next tick, 4 ms later, once the event loop has used up its share.

``worker/cores/core_board.py`` applies these rules. The simulator uses the same times.
"""

from __future__ import annotations

PATIENCE_S = 0.15
"""Seconds of uninterrupted prefill after which decode begins to pause between its steps."""
BREAK_S = 0.005
"""Minimum seconds between two steps that count as a break."""
