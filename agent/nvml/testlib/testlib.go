// Package testlib builds a libnvidia-ml.so.1 that answers from a scenario file, for tests without a GPU.
//
// The library is real to the program under test: it is found by dlopen and called through go-nvml. It reads the file
// named by CARREL_FAKE_NVML at every call where the file changed, so that a test changes the hardware of a running
// agent. Without the variable or the file there are four idle RTX 4090.
//
// The file has one KEY = VALUE per line and # comments. Naming any GPU (gpu0 to gpu31) makes the named ones the whole
// host, in the order of their numbers unless order says otherwise; what is not said about one is as on an idle 4090.
//
//	driver = 550.54.15              cuda = 12040
//	init = DRIVER_NOT_LOADED        nvmlInit fails; under a running program every call does
//	order = 2 0 1                   NVML's order (and number) of GPUs by their numbers here
//	err.CALL = CODE                 a host call fails: init driver_version cuda_version count handle handle_by_uuid events
//	                                event_wait, or all
//	hang = CALL ...                 a host call hangs for as long as the line is there
//	xid = SEQ:GPU:XID[:GI:CI]       an event, delivered once per process to whoever waits; SEQ grows from 1
//	gpu0.uuid = GPU-...             gpu0.name = NVIDIA A100-SXM4-80GB    gpu0.pci = 00000000:07:00.0
//	gpu0.memory_total = 81920       gpu0.memory_used = 4 (MiB)           gpu0.cc = 8.0
//	gpu0.util = 37 (percent)        gpu0.power = 250 (W)                 gpu0.temp = 55 (C)
//	gpu0.compute = PID:MIB PID      gpu0.graphics = PID:MIB              (no MIB: the driver does not say)
//	gpu0.recovery = 1               nvmlDeviceGpuRecoveryAction_t: 0 none, 1 reset, 2 reboot, 3 drain, 4 drain and reset
//	gpu0.mig = on|off|none          gpu0.mig_pending = on
//	gpu0.mig0 = UUID PROFILE MIB [used=MIB] [gi=N] [ci=N] [compute=PID:MIB,...] [by_uuid=CODE]
//	gpu0.err.CALL = CODE            handle uuid name memory pci cc mig_mode mig_count mig_handle gi ci utilization power
//	                                temperature compute graphics recovery events, or all
//	gpu0.hang = CALL ...            or all
//
// CODE is NVML's name without NVML_ERROR_: GPU_IS_LOST, NOT_SUPPORTED, NO_PERMISSION, UNKNOWN, ...
package testlib

import (
	"crypto/sha256"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Env names the scenario file for the library.
const Env = "CARREL_FAKE_NVML"

//go:embed csrc/fake_nvml.c
var source []byte

// Build compiles the library with gcc, without the named symbols, and returns its path, which ends in libnvidia-ml.so.1.
// The result is kept in the user's cache directory under the source's hash. One process must stay with one path: go-nvml
// binds to the first library that it initialises.
func Build(t testing.TB, without ...string) string {
	t.Helper()
	dir, err := os.UserCacheDir()
	if err != nil {
		dir = os.TempDir()
	}
	key := sha256.Sum256(append([]byte(strings.Join(without, ",")+"\x00"), source...))
	dir = filepath.Join(dir, fmt.Sprintf("carrel-fake-nvml-%x", key[:8]))
	path := filepath.Join(dir, "libnvidia-ml.so.1")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	if err := compile(dir, path, without); err != nil {
		t.Fatalf("build the NVML test library: %v", err)
	}
	return path
}

func compile(dir, path string, without []string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	work, err := os.MkdirTemp(dir, "build")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(work) }() // what is left of it harms nobody
	src, out := filepath.Join(work, "fake_nvml.c"), filepath.Join(work, "lib.so")
	if err := os.WriteFile(src, source, 0o600); err != nil {
		return err
	}
	args := []string{
		"-O1", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname,libnvidia-ml.so.1",
		"-o", out,
	}
	for _, symbol := range without {
		args = append(args, "-D"+symbol+"=absent_"+symbol)
	}
	msg, err := exec.Command("gcc", append(args, src, "-lpthread")...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("gcc: %w\n%s", err, msg)
	}
	return os.Rename(out, path)
}

// Scenario is a scenario file. Every change is written at once, by rename, so that the library never sees half of it.
type Scenario struct {
	Path string

	keys   []string
	values map[string]string
	xids   []string
}

// NewScenario makes a scenario file under t.TempDir with KEY, VALUE pairs. Give it to a process by its environment:
// Env+"="+Path; to the test's own process by t.Setenv(Env, Path).
func NewScenario(t testing.TB, pairs ...string) *Scenario {
	t.Helper()
	s := &Scenario{Path: filepath.Join(t.TempDir(), "scenario"), values: map[string]string{}}
	s.Set(t, pairs...)
	return s
}

// Set changes or adds KEY, VALUE pairs in one step.
func (s *Scenario) Set(t testing.TB, pairs ...string) {
	t.Helper()
	if len(pairs)%2 != 0 {
		t.Fatalf("scenario: %d arguments, want pairs", len(pairs))
	}
	for i := 0; i < len(pairs); i += 2 {
		if _, ok := s.values[pairs[i]]; !ok {
			s.keys = append(s.keys, pairs[i])
		}
		s.values[pairs[i]] = pairs[i+1]
	}
	s.write(t)
}

// Unset removes keys in one step.
func (s *Scenario) Unset(t testing.TB, keys ...string) {
	t.Helper()
	for _, k := range keys {
		delete(s.values, k)
	}
	s.write(t)
}

// XID adds an event for a GPU by its number here.
func (s *Scenario) XID(t testing.TB, gpu, xid int) {
	t.Helper()
	s.xids = append(s.xids, fmt.Sprintf("%d:%d:%d", len(s.xids)+1, gpu, xid))
	s.write(t)
}

func (s *Scenario) write(t testing.TB) {
	t.Helper()
	var b strings.Builder
	for _, k := range s.keys {
		if v, ok := s.values[k]; ok {
			fmt.Fprintf(&b, "%s = %s\n", k, v)
		}
	}
	for _, x := range s.xids {
		fmt.Fprintf(&b, "xid = %s\n", x)
	}
	tmp := s.Path + ".new"
	if err := os.WriteFile(tmp, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, s.Path); err != nil {
		t.Fatal(err)
	}
}
