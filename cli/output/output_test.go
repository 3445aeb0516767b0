package output

import (
	"bytes"
	"encoding/csv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func FuzzNothingDrivesTheTerminal(f *testing.F) {
	for _, s := range []string{"plain", "\x1b]0;t\x07x", "\x1b[31mred\x1b[0m", "\u009b2Jx", "\x1b", "\x1b[", "a\xffb", "\u202ex", "\x1bPq\x1b\\x", "\u009dx\u009cy", "\u0090", "\x9b31m"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		for name, got := range map[string]string{"Line": Line(s), "Text": Text(s), "Log": Log(s, false)} {
			if !utf8.ValidString(got) {
				t.Errorf("%s(%q) is not UTF-8: %q", name, s, got)
			}
			for _, r := range got {
				if r < 0x20 && (r != '\n' && r != '\t' || name == "Line") || r >= 0x7f && r <= 0x9f || r >= 0x202a && r <= 0x202e {
					t.Errorf("%s(%q) holds %U", name, s, r)
				}
			}
		}
		colored := Log(s, true)
		for rest := colored; ; {
			i := strings.IndexByte(rest, 0x1b)
			if i < 0 {
				break
			}
			n := escape(rest[i:])
			if !isSGR(rest[i : i+n]) {
				t.Errorf("Log(%q, true) holds %q", s, rest[i:i+n])
			}
			rest = rest[i+n:]
		}
	})
}

func TestLineKeepsTheText(t *testing.T) {
	for in, want := range map[string]string{
		"a\nb\tc": "a b c", "\x1b[1;31mred\x1b[0m": "red", "\x1b]8;;http://x\x1b\\link\x1b]8;;\x07": "link", "\u009b31mred": "red", "größe": "größe", "\x1b(Bx": "x", "a\x1bcb": "ab",
	} {
		if got := Line(in); got != want {
			t.Errorf("Line(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestFigures(t *testing.T) {
	for want, got := range map[string]string{
		"0.0000": Hours(0), "2.0000": Hours(7_200_000), "0.0001": Hours(180), "0.0000 ": Hours(179) + " ", "-1.0000": Hours(-3_600_000), "1234567.0000": Hours(1234567 * 3_600_000),
		"0.45": Micros(450_000, 2), "0.450001": Micros(450_001, 6), "-1.00": Micros(-999_999, 2), "0.01": Micros(5_000, 2), "12 ": Micros(11_500_000, 0)[:2] + " ",
		"59s": Age(59 * time.Second), "1m00s": Age(time.Minute), "1h00m": Age(time.Hour), "1d00h": Age(24 * time.Hour), "0s": Age(-time.Second),
		"512MiB": MiB(512), "1.5GiB": MiB(1536), "24GiB": MiB(24576), "1023B": Bytes(1023), "2.5GiB": Bytes(2560 << 20),
		"[##..]": Bar(1, 2, 4), "[....]": Bar(-5, 2, 4), "[####]": Bar(9, 2, 4), "": Bar(1, 0, 4),
	} {
		if strings.TrimSpace(want) != strings.TrimSpace(got) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

type row struct{ name, note string }

var rows = List[row]{
	Columns: []Column[row]{{Name: "name", Title: "NAME", Text: func(r row) string { return r.name }}, {Name: "note", Title: "NOTE", Text: func(r row) string { return r.note }, Color: func(row) string { return Red }}},
	ID:      func(r row) string { return r.name }, Empty: "none",
}

func TestSpreadsheetsDoNotCalculate(t *testing.T) {
	var b bytes.Buffer
	if err := rows.Write(&b, []row{{"=1+1", "-5"}, {"@x", "+49 1"}, {"a,\"b", "line\nend"}}, Options{Format: CSV}); err != nil {
		t.Fatal(err)
	}
	got, err := csv.NewReader(&b).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	if got[1][0] != "'=1+1" || got[1][1] != "-5" || got[2][0] != "'@x" || got[3][0] != `a,"b` || got[3][1] != "line end" {
		t.Errorf("%q", got)
	}
}

func TestTableColoursOnlyWhereAsked(t *testing.T) {
	for color, want := range map[bool]string{false: "NAME  NOTE\na     x\n", true: "NAME  NOTE\na     \x1b[31mx\x1b[0m\n"} {
		var b bytes.Buffer
		if err := rows.Write(&b, []row{{"a", "x"}}, Options{Format: Table, Color: color}); err != nil || b.String() != want {
			t.Errorf("%q %v", b.String(), err)
		}
	}
}

func TestProgressElsewhereThanOnATerminalIsALinePerChange(t *testing.T) {
	var b bytes.Buffer
	p := NewProgress(&b, false, func() int { return 80 })
	for _, s := range [][2]string{{"pull", "pull 1%"}, {"pull", "pull 2%"}, {"start", "starting"}} {
		p.Show(s[0], s[1])
	}
	p.Done()
	if b.String() != "pull 1%\nstarting\n" {
		t.Errorf("%q", b.String())
	}
}
