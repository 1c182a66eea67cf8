"""The interface that backends (the vendors' packages) implement, the search for installed
backends, and the writer of source (`codegen`).
"""
