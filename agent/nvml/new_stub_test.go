//go:build !cgo || !linux

package nvml

import (
	"strings"
	"testing"
)

func TestWithoutCgo(t *testing.T) {
	src := New(Config{})
	inv, err := src.Inventory(t.Context())
	if err != nil || !strings.Contains(inv.Problem, "built without cgo") || len(inv.Devices) != 0 {
		t.Errorf("%+v, %v", inv, err)
	}
}
