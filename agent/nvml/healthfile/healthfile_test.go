package healthfile_test

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/agent/gpu"
	"github.com/carrel-dev/carrel/agent/nvml/healthfile"
)

func TestKeptOverRestarts(t *testing.T) {
	f := healthfile.New(filepath.Join(t.TempDir(), "devices.json"))
	if got, err := f.Load(); err != nil || len(got) != 0 {
		t.Fatalf("without a file: %v, %v", got, err)
	}
	want := []gpu.HealthRecord{{
		Device: gpu.Device{UUID: "GPU-a", Model: "NVIDIA L4", MemoryMiB: 23034}, Failed: true, Reason: "XID 79",
		Since: time.Date(2025, 3, 1, 12, 0, 0, 0, time.UTC),
	}}
	for range 2 {
		if err := f.Save(want); err != nil {
			t.Fatal(err)
		}
	}
	got, err := f.Load()
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestDamagedFileIsAnError(t *testing.T) {
	for _, text := range []string{"", "{", `{"version":2}`, "[]"} {
		path := filepath.Join(t.TempDir(), "devices.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := healthfile.New(path).Load(); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestSaveWithoutDirectoryIsAnError(t *testing.T) {
	dir := t.TempDir()
	if err := healthfile.New(filepath.Join(dir, "none", "devices.json")).Save(nil); err == nil {
		t.Error("no error")
	}
}
