"""
The documentation as a static site, built by `ci/site`.

    results       what the pages show of stored verdicts, gathered once
    cells         the kind and the colour of a cell on the scoreboard
    history       stored verdicts as they were over time, from git, and defects by version of torch
    render        the templates, and their filters
    prose         pages of docs/ as the generator's dialect of Markdown wants them
    stage         all pages and settings, written to the folder that the generator reads
    built         checks of the result: internal links, and nothing that is loaded from the network
    __main__      stage, build, check, and list the versions

`templates` has a template for each kind of page, `assets` the style and the script, and `mkdocs.yml` the settings.
"""
