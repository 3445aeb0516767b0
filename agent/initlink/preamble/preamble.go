// Package preamble is the first line on every connection from carrel-init to its agent: what the connection is for.
package preamble

import (
	"errors"
	"fmt"
	"io"
	"strings"
)

// Version is the newest version of the link that is written. Agents read every version since 1.
const Version = 1

// Kinds of connection.
const (
	Control = "control" // the agent calls WorkspaceService on it
	Stream  = "stream"  // the agent says with a stream.Hello what it will carry
)

// maxLine is the longest line in bytes, its end included.
const maxLine = 128

// ErrMalformed says that a connection does not begin as carrel-init's do.
var ErrMalformed = errors.New("not a carrel-init connection")

// Preamble is the first line. Nonce is what the agent asked a stream to bring; a control connection has none.
type Preamble struct {
	Version int
	Kind    string
	Nonce   string
}

// Write sends p in one write, as the newest version.
func Write(w io.Writer, p Preamble) error {
	line := fmt.Sprintf("carrel-init/%d %s", Version, p.Kind)
	if p.Nonce != "" {
		line += " " + p.Nonce
	}
	if len(line)+1 > maxLine || strings.ContainsAny(p.Nonce, " \n") {
		return fmt.Errorf("preamble: nonce of %d bytes is too long or has a space", len(p.Nonce))
	}
	_, err := io.WriteString(w, line+"\n")
	return err
}

// Read takes the line, and not a byte more, off r.
func Read(r io.Reader) (Preamble, error) {
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := io.ReadFull(r, b); err != nil {
			return Preamble{}, fmt.Errorf("read preamble: %w", err)
		}
		if b[0] == '\n' {
			return parse(string(line))
		}
		if line = append(line, b[0]); len(line) >= maxLine {
			return Preamble{}, fmt.Errorf("%w: first line too long", ErrMalformed)
		}
	}
}

func parse(line string) (Preamble, error) {
	words := strings.Split(line, " ")
	var p Preamble
	if n, err := fmt.Sscanf(words[0], "carrel-init/%d", &p.Version); n != 1 || err != nil || p.Version < 1 {
		return Preamble{}, fmt.Errorf("%w: %.40q", ErrMalformed, line)
	}
	switch {
	case len(words) == 2 && words[1] == Control:
		p.Kind = Control
	case len(words) == 3 && words[1] == Stream && words[2] != "":
		p.Kind, p.Nonce = Stream, words[2]
	default:
		return Preamble{}, fmt.Errorf("%w: %.40q", ErrMalformed, line)
	}
	return p, nil
}
