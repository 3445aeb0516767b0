//go:build linux

package main

import (
	"strings"
	"testing"
)

func TestCheckCountFindsWhatIsMissing(t *testing.T) {
	for _, c := range []struct {
		name, text string
		first      int
		last       int
		fault      string
	}{
		{"whole", "1 100\n2 100\n3 101\n", 1, 3, ""},
		{"from the middle", "7 100\n8 100\n", 7, 8, ""},
		{"empty", "", 5, 4, ""},
		{"a number is missing", "1 100\n3 100\n", 1, 3, "3 where 2"},
		{"a number comes twice", "1 100\n1 100\n", 1, 1, "1 where 2"},
		{"began again", "7 100\n1 101\n", 7, 1, "1 where 8"},
		{"stood still", "1 100\n2 111\n", 1, 2, "stood still for 11s"},
		{"may be slow", "1 100\n2 110\n", 1, 2, ""},
		{"no number", "x 100\n", 1, 0, "no number"},
		{"no time", "1\n", 1, 1, "no time"},
	} {
		t.Run(c.name, func(t *testing.T) {
			last, err := checkCount(c.text, c.first)
			if last != c.last {
				t.Errorf("last is %d, want %d", last, c.last)
			}
			if (err == nil) != (c.fault == "") || (err != nil && !strings.Contains(err.Error(), c.fault)) {
				t.Errorf("fault is %v, want %q", err, c.fault)
			}
		})
	}
}
