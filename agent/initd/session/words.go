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
	var words []string
	var word strings.Builder
	inWord := false
	quote := byte(0)
	for i := 0; i < len(line); i++ {
		c := line[i]
		switch {
		case quote == '\'':
			if c == '\'' {
				quote = 0
			} else {
				word.WriteByte(c)
			}
		case c == '\\' && i+1 < len(line) && (quote == 0 || strings.IndexByte("\"\\$`", line[i+1]) >= 0):
			i++
			word.WriteByte(line[i])
			inWord = true
		case quote == '"':
			if c == '"' {
				quote = 0
			} else {
				word.WriteByte(c)
			}
		case c == '\'' || c == '"':
			quote, inWord = c, true
		case c == ' ' || c == '\t' || c == '\n' || c == '\r':
			if inWord {
				words = append(words, word.String())
				word.Reset()
				inWord = false
			}
		default:
			word.WriteByte(c)
			inWord = true
		}
	}
	if quote != 0 {
		return nil, errQuote
	}
	if inWord {
		words = append(words, word.String())
	}
	return words, nil
}
