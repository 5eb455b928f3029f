"""The account: GPU-hours productive, lost and saved, and bytes by store.

It has a route, views and two templates, of which the fleet page loads one.
"""
