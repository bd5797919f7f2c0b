"""nbgrader's course and exchange, for everybody; the instructor's course folder has a
file of its own.
"""

import os

c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "flashattention"
if "HUB_EXCHANGE" in os.environ:
    c.Exchange.root = os.environ["HUB_EXCHANGE"]
if (
    "NGSHARE_URL" in os.environ
):  # on a cluster people have no accounts, and no folder in common
    import ngshare_exchange

    ngshare_exchange.configureExchange(c, os.environ["NGSHARE_URL"])
course = os.path.expanduser("~/flashattention-course")
if os.path.isdir(course):
    c.CourseDirectory.root = course
