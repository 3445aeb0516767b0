package lifecycle

import (
	"strings"
	"testing"

	"github.com/carrel-dev/carrel/services/fleet"
)

func TestCheckSpecRefusesNonsense(t *testing.T) {
	volume := func(name, target string) fleet.Spec {
		return fleet.Spec{Volumes: []fleet.VolumeUse{{Volume: name, Target: target}}}
	}
	env := func(name string) fleet.Spec { return fleet.Spec{Env: map[string]string{name: "x"}} }
	for _, c := range []struct {
		spec fleet.Spec
		want string // empty: good
	}{
		{fleet.Spec{}, ""},
		{fleet.Spec{GPU: fleet.GPURequest{Count: -1}}, "-1 GPUs cannot be asked for; choose 0 to 1024"},
		{fleet.Spec{GPU: fleet.GPURequest{Count: 1_000_000}}, "1000000 GPUs cannot be asked for"},
		{fleet.Spec{CPUMillis: -5}, "CPU of -5"},
		{fleet.Spec{MemoryMiB: 1 << 60}, "memory of"},
		{fleet.Spec{MemoryMiB: 1024, ShmMiB: 2048}, "more than the memory"},
		{fleet.Spec{PidsLimit: 1}, "pids limit of 1"},
		{fleet.Spec{Image: "a b"}, "catalogue"},
		{env("A_1"), ""},
		{env("1A"), "letters, digits"},
		{env("A-B"), "letters, digits"},
		{env("CARREL_X"), "set by Carrel"},
		{env("NVIDIA_VISIBLE_DEVICES"), "set by Carrel"},
		{env("LD_PRELOAD"), "set by Carrel"},
		{env("CUDA_VISIBLE_DEVICES"), "set by Carrel"},
		{fleet.Spec{Env: map[string]string{"A": strings.Repeat("x", maxEnvBytes)}}, "at most"},
		{volume("data", "/data"), ""},
		{volume("data", "/home/ana/data"), ""},
		{volume("data", "/usr/local/data"), ""},
		{volume("data", "data"), "not a clean absolute path"},
		{volume("data", "/a/../etc"), "not a clean absolute path"},
		{volume("data", "/a:b"), "not a clean absolute path"},
		{volume("data", "/"), "not a clean absolute path"},
		{volume("data", "/etc"), "which the workspace itself needs"},
		{volume("data", "/proc/sys"), "which the workspace itself needs"},
		{volume("data", "/home"), "which the workspace itself needs"},
		{volume("data", "/home/ana"), "which the workspace itself needs"},
		{volume("Data", "/data"), "volume name"},
		{fleet.Spec{Volumes: []fleet.VolumeUse{{Volume: "a", Target: "/a"}, {Volume: "b", Target: "/a"}}}, "named twice"},
	} {
		err := checkSpec(&c.spec)
		if c.want == "" {
			if err != nil {
				t.Errorf("%+v: %v", c.spec, err)
			}
			continue
		}
		if !fleet.IsKind(err, fleet.KindInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v:\n got %v\nwant %s", c.spec, err, c.want)
		}
	}
}

func TestNormalReference(t *testing.T) {
	for in, want := range map[string]string{
		"debian": "docker.io/library/debian", "ana/torch:1": "docker.io/ana/torch:1", "ghcr.io/lab/x": "ghcr.io/lab/x",
		"localhost/x": "localhost/x", "reg:5000/x": "reg:5000/x", "index.docker.io/library/x": "docker.io/library/x",
	} {
		if got := normalReference(in); got != want {
			t.Errorf("%s became %s, want %s", in, got, want)
		}
	}
}

func TestPendingNamesWhatTheNextRunGets(t *testing.T) {
	w := fleet.Workspace{Spec: fleet.Spec{Pool: "default", GPU: fleet.GPURequest{Count: 1}, Env: map[string]string{"A": "1", "B": "2"}}}
	w.Pending = w.Spec
	if got := Pending(&w); len(got) != 0 {
		t.Errorf("nothing pending, got %v", got)
	}
	w.Pending.GPU.Count, w.Pending.Env = 2, map[string]string{"A": "1"}
	if got := strings.Join(Pending(&w), " "); got != "gpu env" {
		t.Errorf("pending %s", got)
	}
	if _, err := merge(w.Spec, w.Pending, []string{"name"}); !fleet.IsKind(err, fleet.KindInvalid) {
		t.Errorf("an unknown field: %v", err)
	}
}
