// Command sizecheck is the alarm for files, functions and packages that grow too long; generated code does not count.
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// The limits are those of the project's style: the tail is what tells sprawling code from good code, not the median.
const (
	fileLines    = 600  // no file over it; fails
	packageLines = 2000 // tests not counted; warns
	functionP90  = 40   // warns
	functionP99  = 80   // warns
	// functionHard fails: no function of ours has a reason to be this long.
	functionHard = 120
)

// tree is what was measured.
type tree struct {
	files, packages map[string]int
	functions       []function
}

type function struct {
	name  string
	lines int
}

func main() {
	t := tree{files: map[string]int{}, packages: map[string]int{}}
	if err := t.walk(os.DirFS(".")); err != nil {
		fmt.Fprintln(os.Stderr, "sizecheck:", err)
		os.Exit(1)
	}
	if !t.report(os.Stdout) {
		os.Exit(1)
	}
}

func (t *tree) walk(root fs.FS) error {
	return fs.WalkDir(root, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if skipped(name) {
				return fs.SkipDir
			}
			return nil
		}
		switch filepath.Ext(name) {
		case ".go", ".ts", ".tsx", ".sh", ".css", ".proto":
			return t.file(root, name)
		}
		return nil
	})
}

func skipped(dir string) bool {
	base := path.Base(dir)
	return dir == "gen" || dir == "dist" || dir == "bin" || base == "node_modules" || base == "testdata" || base == "out" ||
		(strings.HasPrefix(base, ".") && base != ".")
}

func (t *tree) file(root fs.FS, name string) error {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return err
	}
	if generated(text) {
		return nil
	}
	lines := bytes.Count(text, []byte("\n"))
	t.files[name] = lines
	if path.Ext(name) != ".go" {
		return nil
	}
	if !strings.HasSuffix(name, "_test.go") {
		t.packages[path.Dir(name)] += lines
	}
	set := token.NewFileSet()
	parsed, err := parser.ParseFile(set, name, text, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	for _, decl := range parsed.Decls {
		if f, ok := decl.(*ast.FuncDecl); ok && f.Body != nil {
			length := set.Position(f.End()).Line - set.Position(f.Pos()).Line + 1
			t.functions = append(t.functions, function{fmt.Sprintf("%s:%d %s", name, set.Position(f.Pos()).Line, f.Name.Name), length})
		}
	}
	return nil
}

// generated tells a file that a program wrote, by the mark that Go's tools agree on.
func generated(text []byte) bool {
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 0; n < 5 && lines.Scan(); n++ {
		if strings.HasPrefix(lines.Text(), "// Code generated ") || strings.HasPrefix(lines.Text(), "// @generated ") {
			return true
		}
	}
	return false
}

// report prints what is over a limit and tells whether nothing fails.
func (t *tree) report(out io.Writer) bool {
	good := true
	for _, name := range sorted(t.files) {
		if t.files[name] > fileLines {
			good = false
			fmt.Fprintf(out, "FAIL %s has %d lines, over %d: split it by what it speaks of\n", name, t.files[name], fileLines)
		}
	}
	for _, name := range sorted(t.packages) {
		if t.packages[name] > packageLines {
			fmt.Fprintf(out, "warning: package %s has %d lines, over %d\n", name, t.packages[name], packageLines)
		}
	}
	slices.SortStableFunc(t.functions, func(a, b function) int { return a.lines - b.lines })
	for _, f := range t.functions {
		if f.lines > functionHard {
			good = false
			fmt.Fprintf(out, "FAIL %s has %d lines, over %d\n", f.name, f.lines, functionHard)
		}
	}
	p90, p99 := t.quantile(90), t.quantile(99)
	fmt.Fprintf(out, "%d files, %d functions: p90 %d lines, p99 %d lines\n", len(t.files), len(t.functions), p90, p99)
	if p90 > functionP90 || p99 > functionP99 {
		fmt.Fprintf(out, "warning: functions should keep p90 ≤ %d and p99 ≤ %d lines\n", functionP90, functionP99)
	}
	return good
}

// quantile is the length that percent of the functions do not exceed; they are sorted.
func (t *tree) quantile(percent int) int {
	if len(t.functions) == 0 {
		return 0
	}
	return t.functions[(len(t.functions)*percent-1)/100].lines
}

func sorted(m map[string]int) []string {
	names := make([]string, 0, len(m))
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
