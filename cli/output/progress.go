package output

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"unicode/utf8"
)

// Progress shows what is going on: on a terminal one line that is written over, elsewhere a line at each change of key.
type Progress struct {
	w        io.Writer
	terminal bool
	width    func() int

	mu   sync.Mutex
	key  string
	text string
	live bool // the cursor stands on a line of ours
}

// NewProgress makes one that writes to w; width is asked at each update of a terminal.
func NewProgress(w io.Writer, terminal bool, width func() int) *Progress {
	return &Progress{w: w, terminal: terminal, width: width}
}

// Show puts text up. key names what the text is about, without figures that change all the time: elsewhere than on a
// terminal text is written only when the key changes.
func (p *Progress) Show(key, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	text = Line(text)
	if !p.terminal {
		if key != p.key {
			_, _ = fmt.Fprintln(p.w, text)
		}
		p.key = key
		return
	}
	if text == p.text && p.live {
		return
	}
	p.key, p.text, p.live = key, text, true
	_, _ = fmt.Fprintf(p.w, "\r\x1b[K%s", clip(text, p.width()-1))
}

// Say writes a line that stays.
func (p *Progress) Say(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wipe()
	_, _ = fmt.Fprintln(p.w, Line(text))
}

// Done takes the live line away.
func (p *Progress) Done() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wipe()
}

func (p *Progress) wipe() {
	if p.live {
		_, _ = io.WriteString(p.w, "\r\x1b[K")
		p.live = false
	}
}

// Bar draws done of total in width characters, such as `[####......]`.
func Bar(done, total int64, width int) string {
	if total <= 0 {
		return ""
	}
	n := int(float64(width) * float64(min(max(done, 0), total)) / float64(total))
	return "[" + strings.Repeat("#", n) + strings.Repeat(".", width-n) + "]"
}

func clip(s string, width int) string {
	if width < 1 || utf8.RuneCountInString(s) <= width {
		return s
	}
	return string([]rune(s)[:width-1]) + "…"
}
