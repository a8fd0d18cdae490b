"""The daemon around the pure core: one thread that owns all state, and the threads that bring and carry away.

Pullers, timers, delivery threads and the API put inputs on one bounded queue (``inbox``); the core thread (``live``)
takes them off, feeds the core and commits; delivery threads (``delivery``) work off the outbox. ``schedule`` only
enqueues. ``process`` puts them together.
"""
