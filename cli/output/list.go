package output

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// Format is how a list is written.
type Format string

// The formats.
const (
	Table Format = "table"
	JSON  Format = "json"
	CSV   Format = "csv"
)

// ParseFormat checks the value of -o.
func ParseFormat(s string) (Format, error) {
	switch f := Format(s); f {
	case Table, JSON, CSV:
		return f, nil
	}
	return "", fmt.Errorf("output format %q: use table, json or csv", s)
}

// Column is one column of a list of T.
type Column[T any] struct {
	Name  string         // stable name: the head in CSV
	Title string         // head in a table; empty: not in tables
	Right bool           // numbers: aligned to the right
	Text  func(T) string // cell of a table
	Value func(T) string // cell in CSV; nil: Text
	Color func(T) string // see Paint; nil: none
}

// List knows how rows of T are written.
type List[T any] struct {
	Columns []Column[T]
	ID      func(T) string // what -q prints
	Empty   string         // said on a terminal in place of a table without rows
}

// Options are the choices of one Write.
type Options struct {
	Format Format
	Quiet  bool // ids or names only
	Color  bool
	NoHead bool
}

// Write writes rows. JSON is an array of T as encoding/json has it, indented, `[]` without rows; CSV has a head line
// always (RFC 4180, but lines end with \n).
func (l List[T]) Write(w io.Writer, rows []T, o Options) error {
	if o.Quiet {
		return l.writeIDs(w, rows)
	}
	switch o.Format {
	case JSON:
		if rows == nil {
			rows = []T{}
		}
		return WriteJSON(w, rows)
	case CSV:
		return l.writeCSV(w, rows)
	default:
		return l.writeTable(w, rows, o)
	}
}

func (l List[T]) writeIDs(w io.Writer, rows []T) error {
	var b strings.Builder
	for _, r := range rows {
		b.WriteString(Line(l.ID(r)))
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (l List[T]) writeCSV(w io.Writer, rows []T) error {
	c := csv.NewWriter(w)
	record := make([]string, len(l.Columns))
	for i, col := range l.Columns {
		record[i] = col.Name
	}
	_ = c.Write(record) // Error below has it
	for _, r := range rows {
		for i, col := range l.Columns {
			value := col.Value
			if value == nil {
				value = col.Text
			}
			record[i] = noFormula(Line(value(r)))
		}
		_ = c.Write(record)
	}
	c.Flush()
	return c.Error()
}

// noFormula keeps a spreadsheet from calculating a text that came from elsewhere (OWASP, "CSV Injection"). Numbers stay.
func noFormula(s string) string {
	if s == "" || !strings.ContainsRune("=+-@", rune(s[0])) || isNumber(s) {
		return s
	}
	return "'" + s
}

func isNumber(s string) bool {
	return strings.Trim(s, "+-.0123456789") == ""
}

func (l List[T]) writeTable(w io.Writer, rows []T, o Options) error {
	if len(rows) == 0 && l.Empty != "" {
		_, err := fmt.Fprintln(w, l.Empty)
		return err
	}
	var columns []Column[T]
	for _, c := range l.Columns {
		if c.Title != "" {
			columns = append(columns, c)
		}
	}
	cells := make([][]string, len(rows))
	widths := make([]int, len(columns))
	for i, c := range columns {
		widths[i] = utf8.RuneCountInString(c.Title)
	}
	for i, r := range rows {
		cells[i] = make([]string, len(columns))
		for j, c := range columns {
			cells[i][j] = Line(c.Text(r))
			widths[j] = max(widths[j], utf8.RuneCountInString(cells[i][j]))
		}
	}
	var b strings.Builder
	if !o.NoHead {
		writeRow(&b, columns, widths, func(j int) (string, string) { return columns[j].Title, "" })
	}
	for i, r := range rows {
		writeRow(&b, columns, widths, func(j int) (string, string) {
			if c := columns[j].Color; o.Color && c != nil {
				return cells[i][j], c(r)
			}
			return cells[i][j], ""
		})
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func writeRow[T any](b *strings.Builder, columns []Column[T], widths []int, cell func(int) (text, color string)) {
	var line strings.Builder
	for j, c := range columns {
		text, color := cell(j)
		pad := strings.Repeat(" ", widths[j]-utf8.RuneCountInString(text))
		if j > 0 {
			line.WriteString("  ")
		}
		if c.Right {
			line.WriteString(pad)
		}
		line.WriteString(Paint(text, color))
		if !c.Right {
			line.WriteString(pad)
		}
	}
	b.WriteString(strings.TrimRight(line.String(), " "))
	b.WriteByte('\n')
}

// Pairs writes a table of two columns without a head: names and values. Rows without a value are left out.
func Pairs(w io.Writer, rows [][2]string) error {
	width := 0
	for _, r := range rows {
		if r[1] != "" {
			width = max(width, utf8.RuneCountInString(r[0]))
		}
	}
	var b strings.Builder
	for _, r := range rows {
		if r[1] != "" {
			fmt.Fprintf(&b, "%-*s  %s\n", width, Line(r[0]), Line(r[1]))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteJSON writes v indented by two blanks. Control characters are escaped as JSON has it; nothing else is.
func WriteJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// Colours for Column.Color and Paint.
const (
	Green  = "32"
	Yellow = "33"
	Red    = "31"
	Dim    = "2"
)

// Paint puts text into a colour; none where color is empty.
func Paint(text, color string) string {
	if color == "" || text == "" {
		return text
	}
	return "\x1b[" + color + "m" + text + "\x1b[0m"
}
