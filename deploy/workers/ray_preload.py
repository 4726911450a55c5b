"""Makes a new Ray process a warm standby if one is requested: see ``deploy.workers.standby``.

Ray imports this module in each worker process of a node.
"""

# The modules of the actors that Ray may place here are imported first, on the main thread.
# Otherwise the main thread and the standby's could import them at the same time, and see incomplete
# modules.
from deploy.workers.standby import begin_here
from deploy.workers.worker_process import import_worker

begin_here(import_worker)
