"""Ranks as actors of a Ray cluster, for ``launcher="ray"``. Imported only where that launcher is asked for.

Start with `ray_launcher.RayLauncher`.
"""
