"""The interface that backends (the vendors' packages) implement, and the search for installed
backends.
"""
