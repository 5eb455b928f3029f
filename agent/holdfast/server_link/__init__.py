"""The connection to the server: reports are sent and desired state is polled in the background.

It never blocks training, raises into it or grows without bound. Entry point: `connection.ServerConnection`. May
import `protocol` and `system`; no torch.
"""
