package locksql

import "strings"

// The lexer follows src/backend/parser/scan.l of PostgreSQL 14 to 18. Where versions differ the reading is taken that
// can hide no call: a number ends where the longest number of any version ends, and letters after it are a token of
// their own (a syntax error since 15; before, "1UNION SELECT ..." was two tokens).

// kind of a token. A punctuation character or one-character operator of scan.l's "self" is its own kind.
type kind uint8

const (
	tEOF    kind = 128 + iota
	tIdent       // unquoted: keyword or name, folded to lower case
	tQuoted      // "..." or U&"...": exact
	tString      // '...', E'...', U&'...', $tag$...$tag$
	tBits        // B'...', X'...'
	tNumber
	tParam // $1
	tCast  // ::
	tOp    // any other operator, also .. := =>
	tOther // what no rule takes; the server refuses it
	tUnterminated
)

// token is a span of the text.
type token struct {
	kind       kind
	start, end int
}

// lexer splits src into tokens. A copy looks ahead.
type lexer struct {
	src     string
	pos     int
	signs   int  // up to here src holds plus and minus signs that are tokens of one byte
	escapes bool // standard_conforming_strings is off: backslash escapes in '...'
}

func (l *lexer) text(t token) string { return l.src[t.start:t.end] }

// next returns the next token. U&'...' and U&"..." include their UESCAPE clause, which scan.l leaves to parser.c.
func (l *lexer) next() token {
	t := l.scan()
	if (t.kind == tString || t.kind == tQuoted) && lowerByte(l.src[t.start]) == 'u' {
		ahead := *l
		if u := ahead.scan(); l.word(u) == "uescape" {
			if s := ahead.scan(); s.kind == tString && lowerByte(l.src[s.start]) != 'u' {
				*l = ahead
				t.end = s.end
			}
		}
	}
	return t
}

func (l *lexer) scan() token {
	if !l.space() {
		return token{tUnterminated, len(l.src), len(l.src)}
	}
	start := l.pos
	if start >= len(l.src) {
		return token{tEOF, start, start}
	}
	switch c := l.src[start]; {
	case isIdentStart(c):
		if k, quote := l.prefixed(c); quote > 0 {
			return l.quoted(k, start, start+quote, lowerByte(c) == 'e')
		}
		for l.pos < len(l.src) && isIdent(l.src[l.pos]) {
			l.pos++
		}
		return token{tIdent, start, l.pos}
	case isDigit(c) || c == '.' && isDigit(l.at(1)):
		l.number()
		return token{tNumber, start, l.pos}
	case c == '\'':
		return l.quoted(tString, start, start, l.escapes)
	case c == '"':
		return l.quoted(tQuoted, start, start, false)
	case c == '$':
		return l.dollar()
	case c == ':' && l.at(1) == ':':
		return l.take(tCast, 2)
	case c == ':' && l.at(1) == '=', c == '.' && l.at(1) == '.':
		return l.take(tOp, 2)
	case isOp(c):
		return l.takeOperator()
	case strings.IndexByte(",()[].;:", c) >= 0:
		return l.take(kind(c), 1)
	}
	return l.take(tOther, 1)
}

// at is the byte n after the position, 0 at the end.
func (l *lexer) at(n int) byte {
	if l.pos+n < len(l.src) {
		return l.src[l.pos+n]
	}
	return 0
}

func (l *lexer) take(k kind, n int) token {
	l.pos += n
	return token{k, l.pos - n, l.pos}
}

// space skips white space and comments; false: a comment does not end.
func (l *lexer) space() bool {
	for l.pos < len(l.src) {
		switch c := l.src[l.pos]; {
		case isSpace(c):
			l.pos++
		case c == '-' && l.at(1) == '-':
			l.lineComment()
		case c == '/' && l.at(1) == '*':
			if !l.blockComment() {
				return false
			}
		default:
			return true
		}
	}
	return true
}

func (l *lexer) lineComment() {
	for l.pos < len(l.src) && !isNewline(l.src[l.pos]) {
		l.pos++
	}
}

// blockComment skips one, with the comments nested in it.
func (l *lexer) blockComment() bool {
	depth := 0
	for l.pos+1 < len(l.src) {
		switch {
		case l.src[l.pos] == '/' && l.src[l.pos+1] == '*':
			depth++
			l.pos += 2
		case l.src[l.pos] == '*' && l.src[l.pos+1] == '/':
			depth--
			l.pos += 2
			if depth == 0 {
				return true
			}
		default:
			l.pos++
		}
	}
	l.pos = len(l.src)
	return false
}

// prefixed tells what a quote after the letter c begins, and how far the quote is; 0: c begins an identifier.
// N'...' is the keyword NCHAR and a string, so it is no case here.
func (l *lexer) prefixed(c byte) (kind, int) {
	switch lowerByte(c) {
	case 'e':
		if l.at(1) == '\'' {
			return tString, 1
		}
	case 'b', 'x':
		if l.at(1) == '\'' {
			return tBits, 1
		}
	case 'u':
		if l.at(1) == '&' && l.at(2) == '\'' {
			return tString, 2
		}
		if l.at(1) == '&' && l.at(2) == '"' {
			return tQuoted, 2
		}
	}
	return 0, 0
}

// quoted reads a literal or identifier whose opening quote is at open.
func (l *lexer) quoted(k kind, start, open int, backslash bool) token {
	quote := l.src[open]
	for i := open + 1; i < len(l.src); i++ {
		switch c := l.src[i]; {
		case c == '\\' && backslash:
			i++
		case c != quote:
		case i+1 < len(l.src) && l.src[i+1] == quote:
			i++
		default:
			if quote == '\'' {
				if next := continued(l.src, i+1); next > 0 {
					i = next
					continue
				}
			}
			l.pos = i + 1
			return token{k, start, l.pos}
		}
	}
	l.pos = len(l.src)
	return token{tUnterminated, start, l.pos}
}

// continued finds the quote that continues a string whose closing quote is before i: another string joins it when only
// white space and line comments with a newline among them are between. 0: none.
func continued(s string, i int) int {
	newline := false
	for ; i < len(s); i++ {
		switch c := s[i]; {
		case isNewline(c):
			newline = true
		case isSpace(c):
		case c == '-' && i+1 < len(s) && s[i+1] == '-':
			for i+1 < len(s) && !isNewline(s[i+1]) {
				i++
			}
		case c == '\'' && newline:
			return i
		default:
			return 0
		}
	}
	return 0
}

// dollar reads a parameter, a dollar-quoted string, or a lone dollar sign.
func (l *lexer) dollar() token {
	start := l.pos
	i := start + 1
	if i < len(l.src) && isDigit(l.src[i]) {
		for i < len(l.src) && isDigit(l.src[i]) {
			i++
		}
		return l.take(tParam, i-start)
	}
	for i < len(l.src) && l.src[i] != '$' && isIdent(l.src[i]) {
		i++
	}
	if i >= len(l.src) || l.src[i] != '$' {
		return l.take(tOther, 1)
	}
	tag := l.src[start : i+1]
	body := strings.Index(l.src[i+1:], tag)
	if body < 0 {
		return l.take(tUnterminated, len(l.src)-start)
	}
	return l.take(tString, len(tag)+body+len(tag))
}

// number reads the longest number: 1_000, 0x1F, 0o17, 0b11, 1.5, .5, 1e-5. "1..10" is 1, .., 10.
func (l *lexer) number() {
	if l.src[l.pos] == '0' {
		if is := radixDigit(l.at(1)); is != nil {
			if end := digits(l.src, l.pos+2, is, true); end > l.pos+2 {
				l.pos = end
				return
			}
		}
	}
	l.pos = digits(l.src, l.pos, isDigit, false)
	if l.at(0) == '.' && l.at(1) != '.' {
		l.pos = digits(l.src, l.pos+1, isDigit, false)
	}
	if lowerByte(l.at(0)) == 'e' {
		exp := l.pos + 1
		if c := l.at(1); c == '+' || c == '-' {
			exp++
		}
		if end := digits(l.src, exp, isDigit, false); end > exp {
			l.pos = end
		}
	}
}

// radixDigit is the digit test for the letter after a leading zero; nil: none.
func radixDigit(c byte) func(byte) bool {
	switch lowerByte(c) {
	case 'x':
		return isHex
	case 'o':
		return func(c byte) bool { return '0' <= c && c <= '7' }
	case 'b':
		return func(c byte) bool { return c == '0' || c == '1' }
	}
	return nil
}

// digits returns the end of the digits at s[i:], with single underscores between them, or before them where allowed.
func digits(s string, i int, is func(byte) bool, leading bool) int {
	for start := i; i < len(s); i++ {
		if s[i] == '_' && i+1 < len(s) && is(s[i+1]) && (leading || i > start) {
			continue
		}
		if !is(s[i]) {
			break
		}
	}
	return i
}

// takeOperator reads the longest run of operator characters that is one operator: it ends before a comment, and a trailing
// + or - belongs to it only if it holds a character that no SQL operator has.
func (l *lexer) takeOperator() token {
	start := l.pos
	if start < l.signs {
		return l.take(kind(l.src[start]), 1)
	}
	end, special := start, false
	for ; end < len(l.src) && isOp(l.src[end]); end++ {
		if c := l.src[end]; end+1 < len(l.src) && (c == '/' && l.src[end+1] == '*' || c == '-' && l.src[end+1] == '-') {
			break
		} else if strings.IndexByte("~!@#^&|`?%", c) >= 0 {
			special = true
		}
	}
	n := end - start
	if !special {
		for n > 1 && (l.src[start+n-1] == '+' || l.src[start+n-1] == '-') {
			n--
		}
		l.signs = end // what was cut off is signs only: reading them again and again would be quadratic
	}
	if c := l.src[start]; n == 1 && strings.IndexByte("+-*/%^<>=", c) >= 0 {
		return l.take(kind(c), 1)
	}
	return l.take(tOp, n)
}

func isSpace(c byte) bool      { return c == ' ' || '\t' <= c && c <= '\r' }
func isNewline(c byte) bool    { return c == '\n' || c == '\r' }
func isDigit(c byte) bool      { return '0' <= c && c <= '9' }
func isHex(c byte) bool        { return isDigit(c) || 'a' <= lowerByte(c) && lowerByte(c) <= 'f' }
func isIdentStart(c byte) bool { return 'a' <= c|0x20 && c|0x20 <= 'z' || c == '_' || c >= 0x80 }
func isIdent(c byte) bool      { return isIdentStart(c) || isDigit(c) || c == '$' }

func isOp(c byte) bool {
	switch c {
	case '~', '!', '@', '#', '^', '&', '|', '`', '?', '+', '-', '*', '/', '%', '<', '>', '=':
		return true
	}
	return false
}

func lowerByte(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		c |= 0x20
	}
	return c
}

// lower folds as the server folds an identifier, except for letters outside ASCII in single-byte encodings.
func lower(s string) string {
	for i := range len(s) {
		if lowerByte(s[i]) != s[i] {
			b := []byte(s)
			for i, c := range b {
				b[i] = lowerByte(c)
			}
			return string(b)
		}
	}
	return s
}

// equalFold reports whether s is word, which is lower case, in any ASCII case.
func equalFold(s, word string) bool {
	if len(s) != len(word) {
		return false
	}
	for i := range len(s) {
		if lowerByte(s[i]) != word[i] {
			return false
		}
	}
	return true
}
