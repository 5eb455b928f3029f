"""Resume after kills, by the frameworks themselves and by Holdfast: exactness, lines, time, blocked time."""
