package rpc

import (
	"testing"

	"github.com/carrel-dev/carrel/services/fleet"
)

func TestPagesCoverAllOnceAndRefuseForeignTokens(t *testing.T) {
	all := make([]int, 1005)
	for i := range all {
		all[i] = i
	}
	for _, size := range []int32{0, 1, 7, 1000} {
		var seen []int
		token := ""
		for {
			page, next, err := slicePage(all, size, token)
			if err != nil {
				t.Fatal(err)
			}
			seen = append(seen, page...)
			if next == "" {
				break
			}
			token = next
		}
		if len(seen) != len(all) || seen[len(seen)-1] != 1004 {
			t.Errorf("size %d: saw %d of %d", size, len(seen), len(all))
		}
	}
	for _, size := range []int32{-1, 1001, 1 << 30} {
		if _, _, err := slicePage(all, size, ""); !fleet.IsKind(err, fleet.KindInvalid) {
			t.Errorf("size %d: %v", size, err)
		}
	}
	for _, token := range []string{"!", "LTE", "eA", "OTk5OTk5OTk5OTk5OTk5OTk5OTk5"} { // -1, x, more than fits
		if _, _, err := slicePage(all, 0, token); !fleet.IsKind(err, fleet.KindInvalid) {
			t.Errorf("token %q: %v", token, err)
		}
	}
	if page, next, err := slicePage(all, 0, "OTk5OTk"); err != nil || len(page) != 0 || next != "" { // 99999: the list has shrunk
		t.Errorf("beyond the end: %v %q %v", page, next, err)
	}
}
