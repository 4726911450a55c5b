"""Ray imports this in each process that it starts on a node of Baton's: see
``deploy.workers.standby``."""

# Those who may be placed here come first, on the main thread, which would import them beside the
# one that stands by: two threads may meet modules half made.
from deploy.workers.standby import begin_here
from deploy.workers.worker_process import import_worker

begin_here(import_worker)
