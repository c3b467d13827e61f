package locksql

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// The plain form: SELECT call [AS name] {, call [AS name]}. This is the only form whose locks are counted, so what it
// accepts is what is certain: which functions run, once each, with which arguments, in which result column.

// maxDepth bounds the parser's recursion on parentheses; deeper arguments are not plain.
const maxDepth = 50

// maxColumns is MaxTupleAttributeNumber: the server refuses more result columns.
const maxColumns = 1664

// parser reads one text, or a string in it.
type parser struct {
	lexer
	tok token // the current one
	end int   // of the one before
}

func (p *parser) advance() token {
	t := p.tok
	p.end = t.end
	p.tok = p.next()
	return t
}

func (p *parser) accept(k kind) bool {
	if p.tok.kind != k {
		return false
	}
	p.advance()
	return true
}

func (p *parser) acceptWord(w string) bool {
	if p.word(p.tok) != w {
		return false
	}
	p.advance()
	return true
}

// named reports whether the current token is a word or a quoted name.
func (p *parser) named() bool { return p.tok.kind == tIdent || p.tok.kind == tQuoted }

// acceptName reads a name that is perhaps qualified by one schema. A plain keyword is a name too.
func (p *parser) acceptName() (schema, name string, first token, ok bool) {
	if !p.named() {
		return "", "", token{}, false
	}
	first = p.advance()
	name = p.name(first)
	if p.accept('.') {
		if !p.named() {
			return "", "", first, false
		}
		schema, name = name, p.name(p.advance())
	}
	return schema, name, first, true
}

// plain reads a whole text of the plain form.
func (p *parser) plain() (calls []Call, ok bool) {
	if !p.acceptWord("select") {
		return nil, false
	}
	for {
		c, ok := p.plainCall()
		if !ok {
			return nil, false
		}
		if calls = append(calls, c); len(calls) > maxColumns {
			return nil, false
		}
		if p.acceptWord("as") && !p.named() {
			return nil, false
		}
		// A word that begins a clause is followed by something and fails below; these two are operators by themselves.
		if w := p.word(p.tok); w == "isnull" || w == "notnull" {
			return nil, false
		}
		if p.named() {
			p.advance()
		}
		if !p.accept(',') {
			break
		}
	}
	for p.accept(';') {
	}
	return calls, p.tok.kind == tEOF
}

// plainCall reads [pg_catalog.]function(arguments).
func (p *parser) plainCall() (c Call, ok bool) {
	schema, name, first, _ := p.acceptName()
	if schema != "" && schema != "pg_catalog" {
		return c, false
	}
	if c.Func, ok = familyFunc(name); !ok || !p.accept('(') {
		return c, false
	}
	c.Start = first.start
	c.Args, ok = p.plainArgs(c.Func)
	c.End = p.end
	if len(c.Args) == 2 {
		c.Space = Pair
	}
	return c, ok
}

// plainArgs reads the arguments of f and the closing parenthesis.
func (p *parser) plainArgs(f Func) (args []Arg, ok bool) {
	if f == UnlockAll {
		return nil, p.accept(')')
	}
	for len(args) < 2 {
		start := p.tok.start
		v, ok := p.expr(0)
		if !ok {
			return nil, false
		}
		args = append(args, p.render(start, p.end, v))
		if p.accept(')') {
			return args, true
		}
		if !p.accept(',') {
			break
		}
	}
	return nil, false
}

// expr reads an expression of literals, parameters, casts, operators and the two hash functions.
func (p *parser) expr(depth int) (v value, ok bool) {
	v, ok = p.operand(depth)
	for ok && p.isOperator(p.tok) {
		op := p.text(p.advance())
		var w value
		w, ok = p.operand(depth)
		if v = combine(v, w); !neverNull(op) {
			v.kind = isUnsure
		}
	}
	return v, ok
}

// isOperator reports whether the token is an operator.
func (l *lexer) isOperator(t token) bool {
	switch t.kind {
	case '+', '-', '*', '/', '%', '^', '<', '>', '=':
		return true
	case tOp:
		op := l.text(t)
		return op != ".." && op != ":=" && op != "=>"
	}
	return false
}

// neverNull reports whether the operator gives a value for all values; -> and the like do not, and then nothing is
// locked.
func neverNull(op string) bool {
	switch op {
	case "+", "-", "*", "/", "%", "^", "&", "|", "#", "~", "<<", ">>", "||", "<", ">", "=", "<=", ">=", "<>", "!=":
		return true
	}
	return false
}

// combine is the expression made of two.
func combine(v, w value) value {
	for _, k := range [...]valueKind{v.kind, w.kind} {
		if k == isNull || k == isUnsure || k == isUnknown {
			return value{kind: isUnsure}
		}
	}
	return value{kind: isExpression}
}

// operand reads {sign} primary {::type}.
func (p *parser) operand(depth int) (value, bool) {
	minus, plus, other := 0, false, false
	for ; p.isOperator(p.tok); p.advance() {
		switch op := p.text(p.tok); op {
		case "-":
			minus++
		case "+":
			plus = true
		default:
			other = true
		}
	}
	v, ok := p.primary(depth)
	for ok && p.accept(tCast) {
		var bits uint8
		bits, ok = p.typeName()
		v = v.cast(bits)
	}
	if other || plus && v.kind != isNumber {
		v = combine(v, v)
	}
	for range minus {
		v = v.minus()
	}
	return v, ok
}

func (p *parser) primary(depth int) (v value, ok bool) {
	switch t := p.tok; t.kind {
	case tNumber:
		p.advance()
		num, ok := parseInteger(p.text(t))
		if !ok {
			return value{kind: isExpression}, true // 1.5, 1e3: rounding is the server's
		}
		return value{kind: isNumber, num: num}, true
	case tString:
		p.advance()
		if v.text, ok = p.unquote(t); ok {
			v.kind = isText
		}
		return v, true
	case tBits:
		p.advance()
		return value{kind: isExpression}, true
	case tParam:
		p.advance()
		n, err := strconv.ParseUint(p.text(t)[1:], 10, 16)
		return value{kind: isParam, param: int(n)}, err == nil && n > 0
	case '(':
		p.advance()
		if depth == maxDepth {
			return v, false
		}
		v, ok = p.expr(depth + 1)
		return v, ok && p.accept(')')
	}
	switch p.word(p.tok) {
	case "null":
		p.advance()
		return value{kind: isNull}, true
	case "cast":
		return p.cast(depth)
	}
	ahead := *p
	if schema, name, _, _ := ahead.acceptName(); ahead.tok.kind == '(' {
		if schema != "" && schema != "pg_catalog" || name != "hashtext" && name != "hashtextextended" || depth == maxDepth {
			return v, false
		}
		*p = ahead
		return p.hash(depth + 1)
	}
	bits, ok := p.typeName()
	if !ok || p.tok.kind != tString {
		return v, false
	}
	v, _ = p.primary(depth) // the string
	return v.cast(bits), true
}

// cast reads CAST(expr AS type).
func (p *parser) cast(depth int) (v value, ok bool) {
	p.advance()
	if depth == maxDepth || !p.accept('(') {
		return v, false
	}
	if v, ok = p.expr(depth + 1); !ok || !p.acceptWord("as") {
		return v, false
	}
	bits, ok := p.typeName()
	return v.cast(bits), ok && p.accept(')')
}

// hash reads the arguments of hashtext or hashtextextended.
func (p *parser) hash(depth int) (value, bool) {
	v := value{kind: isExpression}
	for p.advance(); ; p.advance() {
		w, ok := p.expr(depth)
		if !ok {
			return v, false
		}
		v = combine(v, w)
		if p.tok.kind != ',' {
			return v, p.accept(')')
		}
	}
}

// typeName reads the name of a type and returns the width of an integer type, 0 for any other type.
func (p *parser) typeName() (bits uint8, ok bool) {
	keyword := p.tok.kind == tIdent
	schema, name, _, ok := p.acceptName()
	if !ok {
		return 0, false
	}
	switch keyword = keyword && schema == ""; {
	case name == "double" && keyword, name == "character" && keyword, name == "bit" && keyword:
		if !p.acceptWord("precision") {
			p.acceptWord("varying")
		}
	case schema != "" && schema != "pg_catalog":
	case name == "int8" || name == "bigint" && keyword:
		bits = 64
	case name == "int4" || (name == "int" || name == "integer") && keyword:
		bits = 32
	case name == "int2" || name == "smallint" && keyword:
		bits = 16
	}
	if p.accept('(') {
		for p.accept(tNumber) || p.accept(',') {
		}
		return 0, p.accept(')')
	}
	return bits, true
}

// piece is a part of an expression: text, or a parameter.
type piece struct {
	text  string
	param int
}

// maxExpr bounds what a report shows of an argument.
const maxExpr = 256

// render makes the argument that is written in src[start:end].
func (p *parser) render(start, end int, v value) Arg {
	l := lexer{src: p.src[:end], pos: start, escapes: p.escapes}
	a := Arg{value: v}
	t := l.next()
	if t.end == end && v.kind != isExpression && (t.kind == tNumber || t.kind == tParam) {
		a.Expr = lower(l.text(t))
		return a
	}
	var masked, exact []byte
	var pieces []piece
	var before token
	unary := false
	for t.kind != tEOF && t.kind != tUnterminated && (len(masked) <= maxExpr || v.kind == isExpression) {
		if t.kind == tIdent || t.kind == tQuoted {
			// hashtext and pg_catalog.hashtext make one key.
			ahead := l
			if dot := ahead.next(); dot.kind == '.' && l.name(t) == "pg_catalog" {
				l = ahead
				t = l.next()
				continue
			} else if dot.kind == '(' && before.kind != '.' && l.name(t) == "hashtext" {
				a.Weak = true
			}
		}
		if spaced(before, t, unary) {
			masked, exact = append(masked, ' '), append(exact, ' ')
		}
		unary = l.isOperator(t) && (before == token{} || before.kind == '(' || before.kind == ',' || l.isOperator(before))
		text := l.text(t)
		switch t.kind {
		case tString:
			masked = append(masked, "'…'"...)
			s, _ := l.unquote(t)
			exact = appendQuoted(exact, s)
		case tBits:
			masked = append(masked, "'…'"...)
			exact = append(exact, lower(text)...)
		case tParam:
			masked = append(masked, text...)
			n, _ := strconv.Atoi(text[1:]) // the plain form has checked it, of the others nothing is evaluated
			pieces = append(pieces, piece{text: string(exact)}, piece{param: n})
			exact = exact[:0]
		case tIdent, tNumber:
			masked, exact = append(masked, lower(text)...), append(exact, lower(text)...)
		default:
			masked, exact = append(masked, text...), append(exact, text...)
		}
		before = t
		t = l.next()
	}
	if len(masked) > maxExpr {
		masked = append(trim(masked, maxExpr), "…"...)
	}
	a.Expr = string(masked)
	if v.kind == isExpression {
		a.pieces = append(pieces, piece{text: string(exact)})
	}
	return a
}

// spaced reports whether there is a space between two tokens of an expression, however it was written: a key must not
// depend on that.
func spaced(before, t token, unary bool) bool {
	switch t.kind {
	case ')', '[', ']', ',', '.', tCast:
		return false
	case '(':
		if before.kind == tIdent || before.kind == tQuoted {
			return false
		}
	}
	switch before.kind {
	case 0, '(', '[', '.', tCast:
		return false
	}
	return !unary
}

// trim cuts b to n bytes at most, between characters.
func trim(b []byte, n int) []byte {
	for n > 0 && !utf8.RuneStart(b[n]) {
		n--
	}
	return b[:n]
}

// appendQuoted appends s as a string literal.
func appendQuoted(b []byte, s string) []byte {
	b = append(b, '\'')
	b = append(b, strings.ReplaceAll(s, "'", "''")...)
	return append(b, '\'')
}

// identity is the expression with the values of its parameters; false: one is NULL or not known.
func (a *Arg) identity(arg func(n int) (any, bool)) (string, bool) {
	var b []byte
	for _, p := range a.pieces {
		b = append(b, p.text...)
		if p.param == 0 {
			continue
		}
		switch v, _ := arg(p.param); v := v.(type) {
		case int64:
			b = appendQuoted(b, strconv.FormatInt(v, 10))
		case string:
			b = appendQuoted(b, v)
		default:
			return "", false
		}
	}
	return string(b), true
}
