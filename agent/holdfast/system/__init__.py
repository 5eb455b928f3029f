"""The operating system: files, process memory, priorities, signals, the I/O pool, the supervisor channel.

Entry points: `io_pool` for work in the background, `files` for durable writes, `preemption` for SIGTERM. May
import `errors`, `protocol` and, in `host_memory` alone, torch.
"""
