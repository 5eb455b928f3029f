"""What agents, servers and clients exchange, as msgspec structs.

`messages` are what an agent sends and receives; `jobs`, `timeline`, `questions` and `administration` are what
the HTTP API answers. `retention` parses retention rules, which agents apply and servers preview. A field that a
later version adds has a default, so that an earlier peer can still be decoded. May import `pacing`; knows
neither torch nor the server.
"""
