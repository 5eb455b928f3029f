"""The newest snapshot of each rank in the memory of another host, where it outlives the machine.

Entry point: `tier.PeerMemoryTier`, used with the setting `peers=1`. May import `memory_tier` and what it imports.
"""
