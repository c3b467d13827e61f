package locksql

import (
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// What the text of a literal or a quoted name stands for. It is asked for few tokens, so the lexer only finds their ends.

// nameLen is how much of an identifier counts: NAMEDATALEN - 1.
const nameLen = 63

// name is the name an identifier token stands for, as the server folds and truncates it.
func (l *lexer) name(t token) string {
	var s string
	if t.kind == tIdent {
		s = lower(l.text(t))
	} else {
		s, _ = l.unquote(t)
	}
	if len(s) <= nameLen {
		return s
	}
	return string(trim([]byte(s), nameLen))
}

// unquote returns the content of a tString or tQuoted token; false: the server refuses it.
func (l *lexer) unquote(t token) (string, bool) {
	s := l.text(t)
	if s[0] == '$' {
		tag := strings.IndexByte(s[1:], '$') + 2
		return s[tag : len(s)-tag], true
	}
	if lowerByte(s[0]) == 'u' {
		return unquoteUnicode(s)
	}
	backslash := l.escapes && s[0] == '\''
	if lowerByte(s[0]) == 'e' {
		s, backslash = s[1:], true
	}
	body, _ := segments(s, backslash)
	if backslash {
		return unescape(body)
	}
	return body, true
}

// segments joins a quoted token's parts and halves its doubled quotes; the rest is what follows the token.
// A backslash keeps the byte after it, for [unescape].
func segments(s string, backslash bool) (body, rest string) {
	quote, start := s[0], 1
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch c := s[i]; {
		case c == '\\' && backslash:
			i++
		case c != quote:
		case i+1 < len(s) && s[i+1] == quote:
			b.WriteString(s[start:i])
			b.WriteByte(quote)
			i++
			start = i + 1
		default:
			b.WriteString(s[start:i])
			next := continued(s, i+1) // never after a quoted name: what is left of the token is its UESCAPE clause
			if next == 0 {
				return b.String(), s[i+1:]
			}
			i, start = next, next+1
		}
	}
	return b.String(), ""
}

// unescape resolves the backslash escapes of E'...'.
func unescape(s string) (string, bool) {
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' {
			b = append(b, s[i])
			continue
		}
		i++
		switch c := s[i]; c {
		case 'b':
			b = append(b, '\b')
		case 'f':
			b = append(b, '\f')
		case 'n':
			b = append(b, '\n')
		case 'r':
			b = append(b, '\r')
		case 't':
			b = append(b, '\t')
		case 'v':
			b = append(b, '\v')
		case '0', '1', '2', '3', '4', '5', '6', '7':
			n := prefix(s[i:], 3, func(c byte) bool { return '0' <= c && c <= '7' })
			v, _ := strconv.ParseUint(s[i:i+n], 8, 16)
			b = append(b, byte(v))
			i += n - 1
		case 'x':
			n := prefix(s[i+1:], 2, isHex)
			if n == 0 {
				b = append(b, c)
				break
			}
			v, _ := strconv.ParseUint(s[i+1:i+1+n], 16, 8)
			b = append(b, byte(v))
			i += n
		case 'u', 'U':
			n := 4
			if c == 'U' {
				n = 8
			}
			if prefix(s[i+1:], n, isHex) < n {
				return "", false
			}
			v, _ := strconv.ParseUint(s[i+1:i+1+n], 16, 32)
			b = appendCodePoint(b, rune(v))
			i += n
		default:
			b = append(b, c)
		}
	}
	return string(b), true
}

// unquoteUnicode reads U&'...' or U&"..." with its UESCAPE clause, if any.
func unquoteUnicode(s string) (string, bool) {
	body, rest := segments(s[2:], false)
	esc := byte('\\')
	if rest != "" {
		clause := lexer{src: rest}
		clause.scan()
		c, _ := clause.unquote(clause.scan())
		if len(c) != 1 || isHex(c[0]) || isSpace(c[0]) || strings.IndexByte(`+'"`, c[0]) >= 0 {
			return "", false
		}
		esc = c[0]
	}
	b := make([]byte, 0, len(body))
	for i := 0; i < len(body); i++ {
		if body[i] != esc {
			b = append(b, body[i])
			continue
		}
		i++
		n := 4
		switch {
		case i < len(body) && body[i] == esc:
			b = append(b, esc)
			continue
		case i < len(body) && body[i] == '+':
			n = 6
			i++
		}
		if prefix(body[i:], n, isHex) < n {
			return "", false
		}
		v, _ := strconv.ParseUint(body[i:i+n], 16, 32)
		b = appendCodePoint(b, rune(v))
		i += n - 1
	}
	return string(b), true
}

// appendCodePoint appends r. A UTF-16 half is kept as it is until the other half comes: different strings must not
// become the same.
func appendCodePoint(b []byte, r rune) []byte {
	if !utf16.IsSurrogate(r) {
		return utf8.AppendRune(b, r)
	}
	if n := len(b) - 3; n >= 0 && b[n] == 0xED && b[n+1]&0xF0 == 0xA0 {
		high := 0xD000 | rune(b[n+1]&0x3F)<<6 | rune(b[n+2]&0x3F)
		return utf8.AppendRune(b[:n], utf16.DecodeRune(high, r))
	}
	return append(b, 0xED, 0x80|byte(r>>6)&0x3F, 0x80|byte(r)&0x3F)
}

// prefix is how many of the first n bytes of s pass.
func prefix(s string, n int, is func(byte) bool) int {
	i := 0
	for i < len(s) && i < n && is(s[i]) {
		i++
	}
	return i
}
