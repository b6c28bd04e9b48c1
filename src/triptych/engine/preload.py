"""First module that the forkserver imports: makes the process fit to be the parent of replicas.

Signals are settled before anything slow, because a signal to the whole process group may arrive while torch is
being imported; the server starts the forkserver with both signals blocked, so none is lost to the window before
this line. The environment set here reaches the forkserver and its children only, never the server.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})

import atexit  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402

import setproctitle  # noqa: E402

# Given by the server: asking for the parent here is too late if the server has already died.
SERVER_PID = int(os.environ.pop("_TRIPTYCH_SERVER_PID", os.getppid()))
# Threads do not survive a fork: OpenBLAS must not start any while numpy is imported.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# torch.cuda.is_available() would otherwise initialise CUDA and so spoil it for every child.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# Idle compute threads sleep: replicas share cores with each other, the server and whatever else runs there, and with
# threads that spin a picture took ten times as long on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

SOCKET_FOLDER = os.environ.pop("_TRIPTYCH_SOCKET_FOLDER", None)


def clean_up_after_server() -> None:
    """Remove the folder of our own socket, if the server that made it was killed before it could."""
    if SOCKET_FOLDER is not None and os.getppid() != SERVER_PID:
        shutil.rmtree(SOCKET_FOLDER, ignore_errors=True)


atexit.register(clean_up_after_server)  # replicas never come here: they end by os._exit

setproctitle.setproctitle("triptych: forkserver")
