"""
A run as one HTML file that needs no network: what people open when a nightly job fails.

    page         renders the file
    views        a run, arranged in the order in which people read it
    training     two trainings, compared
    pictures     what is drawn rather than told: differences, collectives, bytes

`templates/` holds the page, its style and its script, all of which end up in the file. Like everything in `report`, it
works without torch, on a run file and the contract alone.
"""
