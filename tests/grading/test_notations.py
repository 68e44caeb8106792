"""One value in two notations: spacing commands, named roots, plus-minus, vectors, reactions, words that join."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_rl.data.golds import infer_answer_type
from vlm_rl.grading.grader import Grader, GradeTask, try_grade
from vlm_rl.templates import TEMPLATES

PLAIN = TEMPLATES["plain"]
NUMBERS = st.integers(-99, 99)
# (gold, answer, whether it is right)
NOTATIONS = [
    ('3\\vec{i}', '(3,0)', True),
    ('(0,-2)', '-2\\mathbf{j}', True),
    ('5\\hat{k}', '(0,0,5)', True),
    ('(0,\\frac12,0)', '\\frac{1}{2}\\hat{j}', True),
    ('3\\vec{i}', '(0,3)', False),
    ('3i', '(3,0)', False),
    ('k(k+1)', '(0,0,2)', False),
    ('x=3\\pm2', 'x=5 or x=1', True),
    ('3\\pm0.5', '2.5, 3.5', True),
    ('3\\pm2', '3-2, 2+4', False),
    ('0, \\pm 2', '-2, 0, 2', True),
    ('-2, 0, 2', '0, \\pm 2', True),
    ('-2, 0, 2', 'x=0 or x=\\pm 2', True),
    ('x=-2, x=0, x=2', 'x=0, \\pm 2', True),
    ('\\pm 2, \\pm 3', '2, -2, 3, -3', True),
    ('\\{-2,0,2\\}', '\\{0,\\pm 2\\}', True),
    ('1, 2+\\sqrt3, 2-\\sqrt3', '1, 2\\pm\\sqrt3', True),
    ('1, 2', '1, \\pm 2', False),
    ('-2, 0, 2', '\\pm 2', False),
    ('-2, 0, 2', '0, \\pm 2, \\pm 3', False),
    ('(1,2)', '(1,\\pm 2)', False),
    ('(1,\\pm 2)', '(1,2), (1,-2)', True),
    ('(0,0), (1,2), (1,-2)', '(0,0), (1,\\pm 2)', True),
    ('x=\\pm 2, y=\\pm 3', 'x=2, x=-2, y=3, y=-3', False),
    ('x=\\pm 2, y=\\pm 3', 'x=\\pm 2, y=\\pm 3', True),
    ('x=\\pm 2, y=\\mp 3', 'x=\\pm 2, y=\\pm 3', False),
    ('x=\\pm 2, y=\\pm 3', 'x=\\pm 2, y=\\mp 3', False),
    ('x=\\pm 2, y=\\mp 3', 'y=\\pm 3, x=\\mp 2', True),
    ('(\\pm 2, \\mp 3)', '(\\pm 2, \\pm 3)', False),
    ('(\\pm 2, \\mp 3)', '(\\mp 2, \\pm 3)', True),
    ('\\cos(a\\pm b)=\\cos a\\cos b\\mp\\sin a\\sin b', '\\cos(a\\pm b)=\\cos a\\cos b\\pm\\sin a\\sin b', False),
    ('2\\hat{i}-\\hat{j}', '2\\mathbf i-\\mathbf j', True),
    ('2\\hat{i}-\\hat{j}', '2i-j', True),
    ('2\\hat{i}-\\hat{j}', '2i+j', False),
    ('\\langle 1,2,3\\rangle', '\\hat\\imath+2\\hat\\jmath+3\\hat k', True),
    ('\\langle 1,2,3\\rangle', '<1,2,3>', True),
    ('\\langle 1,2,3\\rangle', '\\left<1,3,2\\right>', False),
    ('(1,2,3)', '[1,2,3]^T', True),
    ('(1,2,3)', '(1,2,3)^{\\top}', True),
    ('\\begin{pmatrix}1\\\\2\\end{pmatrix}', '\\begin{pmatrix}1&2\\end{pmatrix}^T', True),
    ('\\begin{pmatrix}1&2\\end{pmatrix}', '\\begin{pmatrix}1&2\\end{pmatrix}^T', False),
    ('\\begin{pmatrix}3\\\\-4\\end{pmatrix}', '[3,-4]', True),
    ('\\begin{pmatrix}3\\\\-4\\end{pmatrix}', '[-4,3]', False),
    ('(3,4)', '[3,4]', False),
    ('Fe^{3+}', 'Fe3+', True),
    ('Fe^{3+}', 'Fe^{+3}', True),
    ('Fe^{3+}', '\\ce{Fe^{3+}}', True),
    ('Fe^{3+}', 'Fe^{2+}', False),
    ('Fe^{3+}', 'Fe3', False),
    ('Fe^{3+}', 'Fe3-', False),
    ('SO_4^{2-}', '\\ce{SO4^2-}', True),
    ('SO_4^{2-}', 'SO_4^{2+}', False),
    ('NH_4^+', 'NH4+', True),
    ('Na+', '\\mathrm{Na}^{+}', True),
    ('2H_2+O_2\\rightarrow 2H_2O', '2H2(g)+O2(g)->2H2O(l)', True),
    ('2H_2(g)+O_2(g)\\rightarrow 2H_2O(l)', '2H_2(g)+O_2(g)\\rightarrow 2H_2O(g)', False),
    ('N_2+3H_2 \\rightleftharpoons 2NH_3', 'N2 + 3H2 <=> 2NH3', True),
    ('N_2+3H_2 \\rightleftharpoons 2NH_3', 'N2 + H2 <=> 2NH3', False),
    ('12°30\'45"', '12^{\\circ}30^{\\prime}45^{\\prime\\prime}', True),
    ('12°30\'45"', '12^{\\circ}45^{\\prime}30^{\\prime\\prime}', False),
    ('73', '73\\ ', True),
    ('73', 'x=73\\ ', True),
    ('\\frac12', '\\frac{1}{2}\\ ', True),
    ('73', '73\\hspace{1cm}', True),
    ('73', '73\\medspace', True),
    ('73', '73\\hfill', True),
    ('73', '73\\kern 3pt', True),
    ('2, 3', '2,\\ 3\\ ', True),
    ('73', '74\\ ', False),
    ('73', '73\\/', True),
    ('73', '\\ 73', True),
    ('B', 'B\\ ', True),
    ('x_1=2,x_2=3', 'x=2 \\text{ or } x=3', True),
    ('x_{1}=-1,x_{2}=4', 'x=-1, x=4', True),
    ('x_1=2,x_2=3', '2,3', True),
    ('x_1=2,x_2=3', 'x=2 or x=4', False),
    ('x_1=2,x_2=3', 'x=3 or x=2', True),
    ('x_1=2,x_2=3', '2 or 3', True),
    ('x_1=2,x_2=3', '\\{2,3\\}', True),
    ('x_1=2,x_2=3', 'x=2', False),
    ('t_1=0,t_2=5', 't=0 or t=5', True),
    ('x_1=2,x_2=3', 'x=2或x=3', True),
    ('x=2,y=3', 'x=3,y=2', False),
    ('x_1=1,x_2=-1', 'x=\\pm1', True),
    ('\\pm 3', '3, -3', True),
    ('x=\\pm2', 'x=2 or x=-2', True),
    ('x=\\pm2', '\\pm 2', True),
    ('x=\\pm2', '-2, 2', True),
    ('2, -2', '\\pm2', True),
    ('x=2 or x=-2', 'x=\\pm 2', True),
    ('1\\pm\\sqrt2', '1+\\sqrt2, 1-\\sqrt2', True),
    ('x=1\\pm\\sqrt{2}', 'x_1=1+\\sqrt2, x_2=1-\\sqrt2', True),
    ('\\pm 2', '2', False),
    ('\\pm 2', '+2 and -2', True),
    ('\\frac{1\\pm\\sqrt5}{2}', '\\frac{1+\\sqrt5}{2},\\frac{1-\\sqrt5}{2}', True),
    ('x=\\pm2', 'x=2', False),
    ('\\pm 2', '\\mp 2', True),
    ('\\pm2', '±2', True),
    ('\\pm2', '+/-2', True),
    ('\\pm2', '+-2', True),
    ('(3,-4)', '3\\mathbf{i}-4\\mathbf{j}', True),
    ('(1,2,3)', '\\begin{pmatrix}1\\\\2\\\\3\\end{pmatrix}', True),
    ('\\begin{pmatrix}1\\\\2\\\\3\\end{pmatrix}', '(1,2,3)', True),
    ('\\langle1,2,3\\rangle', '\\begin{pmatrix}1\\\\2\\\\3\\end{pmatrix}', True),
    ('(3,-4)', '4\\mathbf{i}-3\\mathbf{j}', False),
    ('(3,-4)', '3\\hat{i}-4\\hat{j}', True),
    ('(3,-4,0)', '3\\vec i-4\\vec j', True),
    ('(1,2,3)', 'i+2j+3k', True),
    ('(1,2,3)', 'i+2j-3k', False),
    ('3i-4j', '(3,-4)', True),
    ('3\\mathbf{i}-4\\mathbf{j}', '\\begin{pmatrix}3\\\\-4\\end{pmatrix}', True),
    ('(1,2,3)', '\\begin{pmatrix}1&2&3\\end{pmatrix}', True),
    ('(1,2,3)', '\\begin{pmatrix}1\\\\2\\\\4\\end{pmatrix}', False),
    ('(0,1,0)', '\\mathbf{j}', True),
    ('(1,0,2)', '\\mathbf{i}+2\\mathbf{k}', True),
    ('(\\frac12,-\\sqrt3)', '\\frac12\\mathbf{i}-\\sqrt3\\mathbf{j}', True),
    ('3+4i', '(3,4)', False),
    ('(1,2)', '\\begin{bmatrix}2\\\\1\\end{bmatrix}', False),
    ('(2,-1)', '2\\hat{\\imath}-\\hat{\\jmath}', True),
    ('2H2 + O2 -> 2H2O', '2H_2 + O_2 \\rightarrow 2H_2O', True),
    ('2H_2+O_2\\rightarrow2H_2O', '2H_2 + O_2 \\to 2H_2O', True),
    ('C6H12O6', '\\mathrm{C_6 H_{12} O_6}', True),
    ('2H2 + O2 -> 2H2O', 'H2 + O2 -> H2O', False),
    ('2H2 + O2 -> 2H2O', 'O2 + 2H2 -> 2H2O', True),
    ('2H2 + O2 -> 2H2O', '2H_2+O_2=2H_2O', True),
    ('2H2 + O2 -> 2H2O', '\\ce{2H2 + O2 -> 2H2O}', True),
    ('2H2 + O2 -> 2H2O', '2H2O -> 2H2 + O2', False),
    ('N2 + 3H2 \\rightleftharpoons 2NH3', 'N_2+3H_2\\rightleftharpoons 2NH_3', True),
    ('2Na + Cl2 -> 2NaCl', '2Na + Cl_2 \\longrightarrow 2NaCl', True),
    ('2Na + Cl2 -> 2NaCl', '2Na + Cl_2 \\longrightarrow 2KCl', False),
    ('CaCO3 → CaO + CO2', '\\mathrm{CaCO_3 \\to CaO + CO_2}', True),
    ('CaCO3 → CaO + CO2', 'CaCO_3 \\xrightarrow{\\Delta} CaO + CO_2', True),
    ('Ag^+ + Cl^- -> AgCl', '\\text{Ag}^{+} + \\text{Cl}^{-} \\rightarrow \\text{AgCl}', True),
    ('2H2 + O2 -> 2H2O', '4H2 + 2O2 -> 4H2O', False),
    ('2H2 + O2 -> 2H2O', '2H₂ + O₂ → 2H₂O', True),
    ('SO_4^{2-}', 'SO4^{2-}', True),
    ('2, 3', '2和3', True),
    ('x=2 or x=3', 'x=2或x=3', True),
    ('2, 3', '2与3', True),
    ('2, 3', '2以及3', True),
    ('2, 3', '2 as well as 3', True),
    ('2, 3', 'both 2 and 3', True),
    ('x=2 or x=3', 'either x=2 or x=3', True),
    ('2, 3', '2和4', False),
    ('2', '2或3', False),
    ('2, 3', '2 & 3', True),
    ('2, 3', '2、3', True),
    ('2, 3', '2及3', True),
    ('x=2,y=3', 'x=2且y=3', True),
    ('3', '2和3', False),
    ('x>3 or x<1', 'x>3或x<1', True),
    ("\\pm2", "plus or minus 2", True),
    ('\\begin{pmatrix}3\\\\-4\\end{pmatrix}', '\\binom{3}{-4}', True),
    ('\\begin{pmatrix}3\\\\4\\end{pmatrix}', '\\binom{3}{4}', True),
    ('\\begin{pmatrix}5\\\\2\\end{pmatrix}', '\\dbinom{5}{2}', True),
    ('\\begin{pmatrix}5\\\\2\\end{pmatrix}', '{5 \\choose 2}', True),
    ('\\begin{pmatrix}5\\\\2\\end{pmatrix}', '5 \\choose 2', True),
    ('\\begin{bmatrix}-5\\\\\\frac12\\end{bmatrix}', '\\tbinom{-5}{\\frac{1}{2}}', True),
    ('\\binom{3}{-4}', '\\begin{pmatrix}3\\\\-4\\end{pmatrix}', True),
    ('\\binom{3}{-4}', '(3,-4)', True),
    ('(3,-4)', '\\binom{3}{-4}', True),
    ('\\begin{pmatrix}x\\\\2y\\end{pmatrix}', '\\binom{x}{2y}', True),
    ('\\begin{pmatrix}5\\\\2\\end{pmatrix}', '10', False),
    ('\\begin{pmatrix}5\\\\2\\end{pmatrix}', '\\binom{2}{5}', False),
    ('\\begin{pmatrix}5\\\\2\\end{pmatrix}', '\\binom{5}{3}', False),
    ('10', '\\binom{5}{2}', True),
    ('\\binom{5}{2}', '10', True),
    ('\\binom{5}{2}', '\\binom{5}{3}', True),
    ('10', '\\begin{pmatrix}5\\\\2\\end{pmatrix}', False),
    ("30^\\circ15'", '30.25^\\circ', True),
    ('30.25^\\circ', "30^\\circ15'", True),
    ("30^\\circ 15'", '30.25', True),
    ("30^\\circ15'30''", '30.258333333333333...^\\circ', True),
    ('12.5^\\circ', "12^\\circ30'", True),
    ("12^\\circ30'", '12° 30′', True),
    ("12^\\circ30'", '12.3^\\circ', False),
    ('12.5^\\circ', "12^\\circ50'", False),
    ("30^\\circ15'", '30^\\circ', False),
    ('2.5 hours', '2 hours 30 minutes', True),
    ('1 h 30 min', '1.5 h', True),
    ('1 h 30 min', '1.3 h', False),
    ('{1,2,3}', '\\{1,2,3\\}', True),
    ('{1,2,3}', '\\{3,2,1\\}', True),
    ('{1, 2, 3}', '\\left\\{1,2,3\\right\\}', True),
    ('\\{1,2,3\\}', '{1,2,3}', True),
    ('\\{1,2,3\\}', '{3,2,1}', True),
    ('{1,2,3}', '\\{1,2\\}', False),
    ('2/3', '三分之二', True),
    ('三分之二', '2/3', True),
    ('三分之二', '\\frac{2}{3}', True),
    ('20%', '百分之二十', True),
    ('百分之二十', '20\\%', True),
    ('百分之二十', '0.2', True),
    ('一半', '1/2', True),
    ('1/2', '一半', True),
    ('0.5', 'half', True),
    ('half', '0.5', True),
    ('5/2', 'two and a half', True),
    ('two and a half', '2.5', True),
    ('three quarters', '0.75', True),
    ('three quarters', '3/4', True),
    ('3/4', 'three-quarters', True),
    ('6', 'half a dozen', True),
    ('half a dozen', '6', True),
    ('12', 'a dozen', True),
    ('24', 'two dozen', True),
    ('2.5', 'two and a half', True),
    ('百分之二十', '20%', True),
    ('三分之二', '\\frac23', True),
    ('2/3', '3分之2', True),
    ('2.5', '二又二分之一', True),
    ('2.5', '两个半', True),
    ('1.5', '一点五', True),
    ('1.5', '1又1/2', True),
    ('0.75', '四分之三', True),
    ('0.75', '三分之四', False),
    ('20', '百分之二十', False),
    ('1/3', '三分之二', False),
    ('x_1=1, x_2=4', 'x_1=4, x_2=1', True),
    ('x_1=1, x_2=4', 'x_1=4, x_2=2', False),
    ('x=1, x=4', 'x_1=4, x_2=1', True),
    ('1, 4', 'x_1=4, x_2=1', True),
    ('a_1=1, a_2=4', 'a_1=4, a_2=1', False),
    ('2 (mod 5)', '2\\pmod 5', True),
    ('2 (mod 5)', '2 \\bmod 5', True),
    ('2\\pmod 5', '2 (mod 5)', True),
    ('2\\pmod{5}', '2 \\mod 5', True),
    ('2 \\bmod 5', '2 (mod 5)', True),
    ('x\\equiv 2\\pmod 5', 'x \\equiv 2 (mod 5)', True),
    ('x\\equiv 2\\pmod 5', '2 \\pmod 5', True),
    ('2\\pmod 5', 'x\\equiv 2\\pmod 5', True),
    ('x\\equiv 2\\pmod 5', 'x \\equiv 7 (mod 5)', False),
    ('2 (mod 5)', '3 (mod 5)', False),
    ('2 (mod 5)', '2 (mod 6)', False),
    ('2', '17 \\bmod 5', False),
    ('2', '17 \\bmod 5 = 2', True),
    ('2', '2 \\pmod 5', True),
    ('10-20', '10~20', True),
    ('10-20', '10–20', True),
    ('10-20', '10 to 20', True),
    ('10-20', '10～20', True),
    ('10~20', '10-20', True),
    ('10～20', '10-20', True),
    ('10 to 20', '10~20', True),
    ('10–20', '10~20', True),
    ('10-20 cm', '10~20 cm', True),
    ('10-20', '10至20', True),
    ('10~20', '10 to 20', True),
    ('10-20', '10~21', False),
    ('10-20', '-10', False),
    ('1020', '10~20', False),
    ('9:00-17:00', '9:00 to 17:00', True),
    ('9:00 to 17:00', '9:00-17:00', True),
    ('9:00-17:00', '9:00 – 17:00', True),
    ('9:00-17:00', '9:00~17:00', True),
    ('9:00 to 17:00', 'from 9:00 to 17:00', True),
    ('9:00 AM to 5:00 PM', '9:00 AM - 5:00 PM', True),
    ('9 am to 5 pm', '9 am - 5 pm', True),
    ('9 am to 5 pm', '9:00-17:00', False),
    ('9:00 to 17:00', '9:00 to 18:00', False),
    ('9:00 to 17:00', '17:00-9:00', False),
    ('9:00-17:00', '9-17:30', False),
    ('Monday to Friday', 'Monday-Friday', True),
    ('Monday to Friday', 'Monday–Friday', True),
    ('x_1=1, x_2=4', 'y_1=4, y_2=1', False),
    ('x_1=2+\\sqrt3, x_2=2-\\sqrt3', 'x_1=2-\\sqrt{3}, x_2=2+\\sqrt{3}', True),
    ('x_1=1, y_1=4', 'x_1=4, y_1=1', False),
    ('x_1=x_2=2', 'x_1=x_2=2', True),
    ('2', '7 \\pmod 5', False),
    ('2', '3 \\pmod 5', False),
    ('2 \\pmod 5', 'x\\equiv 2\\pmod{5}', True),
    ('2 \\pmod 5', 'x\\equiv 2\\pmod{7}', False),
    ('2 \\pmod 5', 'x\\equiv 3\\pmod{5}', False),
    ('100-200', '100~201', False),
    ('100-200', '100~200', True),
    ('12500', '12~500', True),
    ('face to face', 'face-to-face', True),
    ('{(1,2),(3,4)}', '\\{(3,4),(1,2)\\}', True),
    ('{x|x>2}', '\\{x\\mid x>2\\}', True),
    ('{1,000}', '1000', True),
    ('1,2,3', '{1,2,3}', True),
    ('12\\pi', '12\\pi\\text{平方厘米}', True),
    ('12π平方厘米', '12\\pi', True),
    ('12π平方厘米', '12\\pi\\text{ cm}^2', True),
    ('12π平方厘米', '12\\pi\\text{ cm}', False),
    ('12 cm2', '12\\text{ cm}^2', True),
    ('12 cm2', '12', True),
    ('12 cm2', '12 cm', False),
    ('12 cm2', '12 cm^3', False),
    ('12 m3/s', '12 m^3/s', True),
    ('8 m/s2', '8\\text{ m/s}^2', True),
    ('12m2', '12m^2', False),
    ('12 m^2', '12㎡', True),
    ('12㎥', '12 cubic meters', True),
    ('12㎡', '12 m^3', False),
    ('2:3', '2∶3', True),
    ('2∶3', '3:2', False),
    ('-2', '负2', True),
    ('-1/2', '负1/2', True),
    ('2', '负2', False),
    ('2', '负-2', False),
    ('AB=CD', 'CD=AB', True),
    ('AB=CD', 'AC=BD', False),
    ('AB=5', 'CD=5', False),
    ('2或3', '3或2', True),
    ('x=2或x=-3', 'x=-3或x=2', True),
    ('2和3', '2和4', False),
    ('2，3', '3，2', True),
    ('2、3、5', '5, 3, 2', True),
    ('（1，2），（3，4）', '(3,4), (1,2)', True),
    ('（1，2）', '(2,1)', False),
]  # fmt: skip
# (question, gold, answer, whether it is right)
NAMED_ROOTS = [
    ('Solve x_1+2x_2=9, x_1-x_2=-3.', 'x_1=1, x_2=4', 'x_1=4, x_2=1', False),
    ('Solve x_1+2x_2=9, x_1-x_2=-3.', 'x_1=1, x_2=4', '4, 1', False),
    ('Solve x^2-5x+4=0 with roots x_1, x_2.', 'x_1=1, x_2=4', 'x_1=4, x_2=1', True),
    ('Solve x^2-5x+4=0.', 'x_1=1, x_2=4', '4, 1', True),
]  # fmt: skip


def test_one_value_in_two_notations() -> None:
    tasks = [GradeTask(rf"\boxed{{{answer}}}", gold, infer_answer_type(gold), PLAIN) for gold, answer, _ in NOTATIONS]
    with Grader(workers=1) as grader:
        seen = [grade.correct for grade in grader.grade_many(tasks)]
    assert [case for case, correct in zip(NOTATIONS, seen, strict=True) if correct != case[2]] == []


def test_roots_with_indices_are_unordered_unless_the_question_tells_them_apart() -> None:
    tasks = [
        GradeTask(rf"\boxed{{{answer}}}", gold, "list", PLAIN, question=question)
        for question, gold, answer, _ in NAMED_ROOTS
    ]
    with Grader(workers=1) as grader:
        seen = [grade.correct for grade in grader.grade_many(tasks)]
    assert [case for case, correct in zip(NAMED_ROOTS, seen, strict=True) if correct != case[3]] == []


@given(st.integers(-20, 20), st.integers(-20, 20))
def test_a_binomial_beside_a_column_is_a_column(above: int, below: int) -> None:
    gold = rf"\begin{{pmatrix}}{above}\\{below}\end{{pmatrix}}"
    for first, second in ((above, below), (below, above), (above, below + 1)):
        for answer in (rf"\binom{{{first}}}{{{second}}}", rf"{{{first} \choose {second}}}"):
            grade = try_grade(GradeTask(rf"\boxed{{{answer}}}", gold, "expression", PLAIN), {}, {})
            assert grade is not None and grade.correct == ((first, second) == (above, below)), (gold, answer, grade)


@given(st.integers(1, 179), st.integers(0, 59), st.integers(0, 59))
def test_minutes_and_seconds_are_parts_of_a_degree(degrees: int, minutes: int, seconds: int) -> None:
    gold = rf"{degrees}^\circ {minutes}' {seconds}''"
    value = degrees + Fraction(minutes, 60) + Fraction(seconds, 3600)
    for number, correct in ((value, True), (value + Fraction(1, 3600), False)):
        answer = rf"\frac{{{number.numerator}}}{{{number.denominator}}}^\circ"
        grade = try_grade(GradeTask(rf"\boxed{{{answer}}}", gold, "expression", PLAIN), {}, {})
        assert grade is not None and grade.correct == correct, (gold, answer, grade)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_a_vector_in_three_notations(first: int, second: int, third: int) -> None:
    spelled = (
        f"({first},{second},{third})",
        rf"\begin{{pmatrix}}{first}\\{second}\\{third}\end{{pmatrix}}",
        rf"{first}\mathbf{{i}}+({second})\mathbf{{j}}+({third})\mathbf{{k}}",
    )
    other = f"({first},{second},{third + 1})"
    for gold in spelled:
        for answer in spelled:
            if gold != answer:
                grade = try_grade(GradeTask(rf"\boxed{{{answer}}}", gold, "expression", PLAIN), {}, {})
                assert grade is not None and grade.correct, (gold, answer, grade)
        if gold != spelled[0]:
            grade = try_grade(GradeTask(rf"\boxed{{{other}}}", gold, "expression", PLAIN), {}, {})
            assert grade is not None and grade.verdict == "wrong", (gold, other, grade)


@pytest.mark.parametrize("space", ["\\ ", "\\,", "\\;", "\\quad", "\\hspace{1em}", "\\medspace", "\\hfill", "\\/"])
def test_spacing_leaves_nothing_behind(space: str) -> None:
    for answer, correct in ((f"73{space}", True), (f"{space}73", True), (f"74{space}", False)):
        grade = try_grade(GradeTask(rf"\boxed{{{answer}}}", "73", "integer", PLAIN), {}, {})
        assert grade is not None and grade.correct == correct, (answer, grade)
