"""Sixteen texts that a person might type, two for each domain of the text demo.

They were written, and committed, before the demo was run on any of them, and are not to be changed to please it. The demo's settings were
chosen on `development`'s texts.
"""

QUERIES: tuple[tuple[str, str], ...] = (
    ("medicine", "Patients who took the drug every day had fewer heart attacks than those who received a placebo."),
    ("medicine", "We compared two methods for detecting the virus in samples of saliva."),
    ("film-reviews", "The acting was terrible and the plot made no sense, so I want my money back."),
    ("film-reviews", "A wonderful film about friendship, and the young actress deserves an Oscar."),
    (
        "code-sympy",
        "from sympy import integrate, exp, oo\nx = symbols('x')\nprint(integrate(exp(-x), (x, 0, oo)))\n",
    ),
    ("code-sympy", "def test_simplify():\n    assert simplify(sin(x)**2 + cos(x)**2) == 1\n"),
    ("speeches", "Last year our economy created two million jobs, and I ask the Congress to help us do even better."),
    ("speeches", "Our relations with Spain remain friendly, and the new treaty will be laid before the Senate."),
    ("books", "My dear Watson, you have not noticed the mud upon the stranger's boots."),
    ("books", "The princess sat silent at the table while the officers talked about the war."),
    (
        "code-django",
        "class Comment(models.Model):\n    post = models.ForeignKey(Post, on_delete=models.CASCADE)\n",
    ),
    (
        "code-django",
        "from django.http import JsonResponse\n\ndef view(request):\n    return JsonResponse({'ok': True})\n",
    ),
    ("law", "The jury found him guilty of murder, and he appealed his conviction."),
    ("law", "The landlord breached the lease, so the tenant is entitled to recover the deposit."),
    ("scripture", "And the children of Israel went up against the city, and the LORD delivered it into their hand."),
    ("scripture", "Blessed is the man that giveth bread unto the poor, for the Lord shall reward him."),
)
