"""Another thread forks while a fork that leaves memory out is under way; exit status 0: its child has it all."""

import os
import sys
import threading

import torch

from holdfast.persist import memory

live = torch.ones(4 << 20)
reached = threading.Event()
statuses = []


def fork_and_look():
    pid = os.fork()
    if pid == 0:
        os._exit(0 if float(live.sum()) == live.numel() else 1)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def main():
    torch.set_num_threads(1)
    memory.prepare()
    os.register_at_fork(before=reached.set)  # runs before those registered earlier
    memory._left_out.pages = list(memory._pages([(live.data_ptr(), live.numel() * 4)]))
    memory._before()
    other = threading.Thread(target=fork_and_look)
    other.start()
    reached.wait()
    other.join(0.2)
    memory._after_in_parent()
    other.join()
    sys.exit(statuses != [0])


if __name__ == "__main__":
    main()
