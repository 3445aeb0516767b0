// Package output writes what people and programs read: tables, CSV, JSON, progress.
package output

import (
	"strings"
	"unicode/utf8"
)

// Line makes a string that came from elsewhere safe to show on one line of a terminal: escape sequences, control
// characters (C0, C1, DEL) and characters that reorder text are taken out, line ends and tabs become blanks.
func Line(s string) string { return clean(s, false, false) }

// Text is Line for text of several lines: line ends and tabs stay.
func Text(s string) string { return clean(s, true, false) }

// Log is Line for what a program wrote: tabs stay, and colours (SGR sequences) where color says so.
func Log(s string, color bool) string {
	s = clean(s, true, color)
	return strings.ReplaceAll(s, "\n", " ")
}

func clean(s string, lines, sgr bool) string {
	if isPlain(s) {
		return s
	}
	var b strings.Builder
	colored := false
	for i := 0; i < len(s); {
		if s[i] == 0x1b {
			n := escape(s[i:])
			if seq := s[i : i+n]; sgr && isSGR(seq) {
				b.WriteString(seq)
				colored = true
			}
			i += n
			continue
		}
		r, n := utf8.DecodeRuneInString(s[i:])
		if r >= 0x90 && r <= 0x9f && n > 1 { // DCS, SOS, CSI, OSC, PM, APC as one character
			i += n + c1Body(r, s[i+n:])
			continue
		}
		i += n
		writeRune(&b, r, lines)
	}
	if colored {
		b.WriteString("\x1b[0m")
	}
	return b.String()
}

func isPlain(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] >= 0x7f {
			return false
		}
	}
	return true
}

func writeRune(b *strings.Builder, r rune, lines bool) {
	switch {
	case r == '\n' || r == '\t':
		if !lines {
			r = ' '
		}
		b.WriteRune(r)
	case r < 0x20, r >= 0x7f && r <= 0x9f:
	case r >= 0x202a && r <= 0x202e, r >= 0x2066 && r <= 0x2069, r == 0x200e, r == 0x200f, r == 0x061c:
	case r == 0x2028 || r == 0x2029:
		b.WriteByte(' ')
	default:
		b.WriteRune(r)
	}
}

// escape returns the length of the escape sequence at the start of s (ECMA-48, section 5.4; OSC and its like end with
// ST or BEL). One that does not end takes the rest of s.
func escape(s string) int {
	if len(s) < 2 {
		return len(s)
	}
	switch s[1] {
	case '[':
		return 2 + csi(s[2:])
	case ']', 'P', 'X', '^', '_':
		return 2 + stringBody(s[2:])
	}
	i := 1
	for i < len(s) && s[i] >= 0x20 && s[i] <= 0x2f {
		i++
	}
	if i < len(s) && s[i] >= 0x30 && s[i] <= 0x7e {
		i++
	}
	return i
}

func c1Body(r rune, rest string) int {
	switch r {
	case 0x9b:
		return csi(rest)
	case 0x90, 0x98, 0x9d, 0x9e, 0x9f:
		return stringBody(rest)
	default:
		return 0
	}
}

func csi(s string) int {
	for i := range len(s) {
		if s[i] >= 0x40 && s[i] <= 0x7e {
			return i + 1
		}
		if s[i] < 0x20 || s[i] > 0x3f {
			return i
		}
	}
	return len(s)
}

func stringBody(s string) int {
	for i := range len(s) {
		switch {
		case s[i] == 0x07:
			return i + 1
		case s[i] == 0x1b && i+1 < len(s) && s[i+1] == '\\':
			return i + 2
		case s[i] == 0xc2 && i+1 < len(s) && s[i+1] == 0x9c:
			return i + 2
		}
	}
	return len(s)
}

func isSGR(seq string) bool {
	if len(seq) < 3 || seq[1] != '[' || seq[len(seq)-1] != 'm' {
		return false
	}
	for _, c := range seq[2 : len(seq)-1] {
		if c != ';' && c != ':' && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}
