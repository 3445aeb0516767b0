package session

import (
	"errors"
	"strings"
)

var errQuote = errors.New("this image has no shell to run the command, and the command has a quote without its end")

// splitWords splits a command line into words for images that have no shell. It knows spaces, single quotes, double
// quotes and the backslash (in double quotes before `"`, `\`, `$` and a backtick, as POSIX has it), and nothing else: no variables,
// globs, pipes or redirections, whose characters stay as they are.
func splitWords(line string) ([]string, error) {
	var w splitter
	for i := 0; i < len(line); i++ {
		c := line[i]
		switch {
		case c == '\\' && i+1 < len(line) && w.escapes(line[i+1]):
			i++
			w.add(line[i])
		case w.quote != 0:
			w.quoted(c)
		case c == '\'' || c == '"':
			w.quote, w.inWord = c, true
		case c == ' ' || c == '\t' || c == '\n' || c == '\r':
			w.end()
		default:
			w.add(c)
		}
	}
	if w.quote != 0 {
		return nil, errQuote
	}
	w.end()
	return w.words, nil
}

// splitter is a command line half read.
type splitter struct {
	words  []string
	word   strings.Builder
	inWord bool // also in an empty one between quotes
	quote  byte // the quote that is open, 0 for none
}

// escapes reports whether a backslash before c makes it an ordinary character.
func (w *splitter) escapes(c byte) bool {
	switch w.quote {
	case '\'':
		return false
	case '"':
		return strings.IndexByte("\"\\$`", c) >= 0
	default:
		return true
	}
}

func (w *splitter) add(c byte) {
	w.word.WriteByte(c)
	w.inWord = true
}

func (w *splitter) quoted(c byte) {
	if c == w.quote {
		w.quote = 0
		return
	}
	w.word.WriteByte(c)
}

func (w *splitter) end() {
	if !w.inWord {
		return
	}
	w.words = append(w.words, w.word.String())
	w.word.Reset()
	w.inWord = false
}
