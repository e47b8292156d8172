"""What Python loads at the start of every process of a tormented run: it holds a rank's interpreter when asked.

Ranks may be started by name or forked from a launcher that has this loaded already and learn their rank later, so the
thread that watches starts in either, and waits until there is a rank. Torch-free.
"""

FOLDER = "LOCKSTEP_CHAOS_HOLD"  # the variable that names the folder; a file in it, named for a rank, holds microseconds

TEXT = f"""
import os, threading
def watch(folder):
    import ctypes, time
    while True:
        time.sleep(0.05)
        rank = os.environ.get("RANK")
        if not rank:
            continue
        path = os.path.join(folder, rank)
        try:
            microseconds = int(open(path).read() or 0)
            os.unlink(path)
        except (OSError, ValueError):
            continue
        ctypes.PyDLL(None).usleep(microseconds)
def start():
    threading.Thread(target=watch, args=(os.environ["{FOLDER}"],), daemon=True).start()
if os.environ.get("{FOLDER}"):
    if os.environ.get("RANK"):
        start()
    os.register_at_fork(after_in_child=start)
"""
