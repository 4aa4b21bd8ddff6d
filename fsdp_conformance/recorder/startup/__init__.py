"""
The directory that is put on PYTHONPATH.

    sitecustomize    run by Python when it starts
"""
