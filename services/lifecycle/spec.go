package lifecycle

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Bounds of what a workspace may ask for, so that no request is absurd or endless.
const (
	maxGPUs      = 1024
	maxMillis    = 1024 * 1000      // 1,024 cores
	maxMemoryMiB = 64 * 1024 * 1024 // 64 TiB
	maxPids      = 4 << 20          // PID_MAX_LIMIT of 64-bit Linux
	maxEnv       = 256
	maxEnvBytes  = 64 << 10
	maxVolumes   = 32
)

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// checkSpec says what is wrong with a spec as asked for.
func checkSpec(s *fleet.Spec) error {
	if n := s.GPU.Count; n < 0 || n > maxGPUs {
		return fleet.Errorf(fleet.KindInvalid, "%d GPUs cannot be asked for; choose 0 to %d", n, maxGPUs)
	}
	for _, c := range []struct {
		what     string
		have     int64
		min, max int64
		unit     string
	}{
		{"CPU", s.CPUMillis, 10, maxMillis, "thousandths of a core"},
		{"memory", s.MemoryMiB, 64, maxMemoryMiB, "MiB"},
		{"shm", s.ShmMiB, 1, maxMemoryMiB, "MiB"},
		{"pids limit", s.PidsLimit, 16, maxPids, "processes"},
	} {
		if c.have != 0 && (c.have < c.min || c.have > c.max) {
			return fleet.Errorf(fleet.KindInvalid, "%s of %d %s cannot be asked for; choose %d to %d, or leave it out for the default", c.what, c.have, c.unit, c.min, c.max)
		}
	}
	if s.ShmMiB > 0 && s.MemoryMiB > 0 && s.ShmMiB > s.MemoryMiB {
		return fleet.Errorf(fleet.KindInvalid, "shm of %d MiB is more than the memory of %d MiB that it is part of", s.ShmMiB, s.MemoryMiB)
	}
	if len(s.Image) > 512 || strings.ContainsAny(s.Image, " \t\r\n\x00") {
		return fleet.Errorf(fleet.KindInvalid, "the image name is not a name of the catalogue and not a reference; `carrel image ls` shows the catalogue")
	}
	if err := checkEnv(s.Env); err != nil {
		return err
	}
	return checkVolumes(s.Volumes)
}

func checkEnv(env map[string]string) error {
	if len(env) > maxEnv {
		return fleet.Errorf(fleet.KindInvalid, "%d environment variables are too many; at most %d are allowed", len(env), maxEnv)
	}
	size := 0
	for name, value := range env {
		size += len(name) + len(value)
		switch {
		case !envName.MatchString(name):
			return fleet.Errorf(fleet.KindInvalid, "environment variable %q: use letters, digits and _, and do not begin with a digit", clip(name))
		case ownEnv(name):
			return fleet.Errorf(fleet.KindInvalid, "environment variable %s is set by Carrel; choose another name", name)
		case strings.ContainsRune(value, 0):
			return fleet.Errorf(fleet.KindInvalid, "environment variable %s has a NUL byte in its value", name)
		}
	}
	if size > maxEnvBytes {
		return fleet.Errorf(fleet.KindInvalid, "the environment has %d bytes; at most %d are allowed", size, maxEnvBytes)
	}
	return nil
}

// ownEnv reports whether a variable is Carrel's: what says which devices are leased, and what would change how programs of root load.
func ownEnv(name string) bool {
	for _, prefix := range []string{"CARREL_", "NVIDIA_", "LD_"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return slices.Contains([]string{"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HOME", "USER", "LOGNAME", "SHELL", "GLIBC_TUNABLES"}, name)
}

func checkVolumes(uses []fleet.VolumeUse) error {
	if len(uses) > maxVolumes {
		return fleet.Errorf(fleet.KindInvalid, "%d volumes are too many; at most %d are allowed", len(uses), maxVolumes)
	}
	names, targets := map[string]bool{}, map[string]bool{}
	for _, u := range uses {
		if err := fleet.CheckVolumeName(u.Volume); err != nil {
			return err
		}
		if names[u.Volume] || targets[u.Target] {
			return fleet.Errorf(fleet.KindInvalid, "volume %s:%s is named twice", u.Volume, u.Target)
		}
		names[u.Volume], targets[u.Target] = true, true
		if err := checkTarget(u); err != nil {
			return err
		}
	}
	return nil
}

// checkTarget keeps volumes off paths that the container, its user or carrel-init need.
func checkTarget(u fleet.VolumeUse) error {
	t := u.Target
	if !path.IsAbs(t) || path.Clean(t) != t || t == "/" || len(t) > 255 || strings.ContainsAny(t, ":\x00\n,") {
		return fleet.Errorf(fleet.KindInvalid, "volume %s: %q is not a clean absolute path inside, such as /data", u.Volume, clip(t))
	}
	for _, taken := range []string{"/proc", "/sys", "/dev", "/etc", "/bin", "/sbin", "/usr", "/lib", "/lib64", "/boot", "/run", "/var/run", "/home", "/root", "/tmp", "/.carrel"} {
		inside := strings.HasPrefix(t, taken+"/")
		home := inside && (taken == "/home" || taken == "/usr" || taken == "/root") && strings.Count(t, "/") > 2
		if t == taken || (inside && !home) {
			return fleet.Errorf(fleet.KindInvalid, "volume %s cannot be mounted at %s, which the workspace itself needs; choose a path such as /%s", u.Volume, t, u.Volume)
		}
	}
	return nil
}

// clip keeps an echoed input short.
func clip(s string) string {
	if len(s) > 60 {
		return s[:60] + "…"
	}
	return s
}

// Fields of a spec as an update names them, which are also the keys of Workspace.Origins.
const (
	fieldPool    = "pool"
	fieldImage   = "image"
	fieldGPU     = "gpu"
	fieldCPU     = "cpu_millis"
	fieldMemory  = "memory_mib"
	fieldShm     = "shm_mib"
	fieldPids    = "pids_limit"
	fieldEnv     = "env"
	fieldVolumes = "volumes"
)

// merge takes the named fields of change into spec.
func merge(spec, change fleet.Spec, fields []string) (fleet.Spec, error) {
	for _, f := range fields {
		switch f {
		case fieldPool:
			spec.Pool = change.Pool
		case fieldImage:
			spec.Image, spec.ImageDigest, spec.ImageHost, spec.RequireCUDA = change.Image, "", "", ""
		case fieldGPU:
			spec.GPU = change.GPU
		case fieldCPU:
			spec.CPUMillis = change.CPUMillis
		case fieldMemory:
			spec.MemoryMiB = change.MemoryMiB
		case fieldShm:
			spec.ShmMiB = change.ShmMiB
		case fieldPids:
			spec.PidsLimit = change.PidsLimit
		case fieldEnv:
			spec.Env = change.Env
		case fieldVolumes:
			spec.Volumes = change.Volumes
		default:
			return spec, fleet.Errorf(fleet.KindInvalid, "there is no field %q to update", clip(f))
		}
	}
	return spec, nil
}

// Pending names the fields of a workspace's spec that the next run gets anew.
func Pending(w *fleet.Workspace) []string {
	var out []string
	a, b := &w.Spec, &w.Pending
	note := func(field string, same bool) {
		if !same {
			out = append(out, field)
		}
	}
	note(fieldPool, a.Pool == b.Pool)
	note(fieldImage, a.Image == b.Image && a.ImageDigest == b.ImageDigest)
	note(fieldGPU, a.GPU.Count == b.GPU.Count && slices.Equal(a.GPU.Models, b.GPU.Models))
	note(fieldCPU, a.CPUMillis == b.CPUMillis)
	note(fieldMemory, a.MemoryMiB == b.MemoryMiB)
	note(fieldShm, a.ShmMiB == b.ShmMiB)
	note(fieldPids, a.PidsLimit == b.PidsLimit)
	note(fieldEnv, fmt.Sprint(a.Env) == fmt.Sprint(b.Env)) // fmt prints maps in key order
	note(fieldVolumes, slices.Equal(a.Volumes, b.Volumes))
	return out
}
