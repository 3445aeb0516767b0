package host

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// Bounds of what a run may ask for; all far above what exists.
const (
	maxCPUMillis = 4096 * 1000
	maxMemoryMiB = 64 << 20 // 64 TiB
	maxPids      = 4 << 20  // PID_MAX_LIMIT of 64-bit Linux
	maxEnv       = 1 << 20  // bytes; execve(2) allows about 2 MiB with the arguments
	maxGrace     = time.Hour
)

// reservedEnv says whether Carrel alone sets a variable: what names devices, and its own.
func reservedEnv(name string) bool {
	switch name {
	case "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
		"LD_PRELOAD":
		return true
	}
	return strings.HasPrefix(name, "NVIDIA_") || strings.HasPrefix(name, "CARREL_")
}

// checkSet says why a whole set cannot be taken; a single run that is wrong is refused by itself.
func checkSet(set Set) error {
	seen := map[Key]bool{}
	for i := range set.Runs {
		d := &set.Runs[i]
		switch {
		case !d.Key.valid():
			return Errorf(KindInvalid, "run %q is not a workspace id and an epoch from 1 on", d.Key)
		case d.Goal != GoalRunning && d.Goal != GoalGone:
			return Errorf(KindInvalid, "run %s: its goal is neither running nor gone", d.Key)
		case seen[d.Key]:
			return Errorf(KindInvalid, "run %s is named twice", d.Key)
		}
		seen[d.Key] = true
	}
	for _, id := range set.VolumesGone {
		if !volumeID.MatchString(id) {
			return Errorf(KindInvalid, "volume %q is not a volume id", id)
		}
	}
	return nil
}

// refuse says in one sentence why this host does not run what is asked; empty: it does. It reads the host's files.
func (h *Host) refuse(d *Desired) string {
	p := &h.opts.Policy
	if why := checkSizes(d); why != "" {
		return why
	}
	if why := checkNames(d); why != "" {
		return why
	}
	if p.MaxGPUs > 0 && len(d.Devices) > p.MaxGPUs {
		return fmt.Sprintf("%d devices are more than the %d that the host policy file allows", len(d.Devices), p.MaxGPUs)
	}
	if !p.allowsImage(d.ImageReference) {
		return fmt.Sprintf("the host policy file does not allow the image %s", d.ImageReference)
	}
	if why := checkDevices(d, h.excluded()); why != "" {
		return why
	}
	if why := checkEnv(d.Env); why != "" {
		return why
	}
	if why := p.identity(d.Identity, h.opts.Passwd); why != "" {
		return why
	}
	return h.refuseMounts(d)
}

func checkSizes(d *Desired) string {
	switch {
	case d.CPUMillis < 10 || d.CPUMillis > maxCPUMillis: // the engine's least is 0.01 cores
		return fmt.Sprintf("%d thousandths of a core is not between 10 and %d", d.CPUMillis, maxCPUMillis)
	case d.MemoryMiB < 16 || d.MemoryMiB > maxMemoryMiB: // the engine's least is 6 MiB
		return fmt.Sprintf("%d MiB of memory is not between 16 and %d", d.MemoryMiB, maxMemoryMiB)
	case d.ShmMiB < 1 || d.ShmMiB > d.MemoryMiB:
		return fmt.Sprintf("%d MiB of shared memory is not between 1 and the memory's %d", d.ShmMiB, d.MemoryMiB)
	case d.PidsLimit < 64 || d.PidsLimit > maxPids:
		return fmt.Sprintf("a limit of %d processes is not between 64 and %d", d.PidsLimit, maxPids)
	case d.StopGrace < 0 || d.StopGrace > maxGrace:
		return fmt.Sprintf("a stop grace of %s is not between 0 and %s", d.StopGrace, maxGrace)
	}
	return ""
}

func checkNames(d *Desired) string {
	switch {
	case !hostName(d.Name):
		return fmt.Sprintf("the name %q cannot be a host name", d.Name)
	case d.ImageReference == "" || len(d.ImageReference) > 1024 || strings.ContainsAny(d.ImageReference, " \t\r\n\x00"):
		return fmt.Sprintf("%q is no image reference", d.ImageReference)
	case !digestPattern.MatchString(d.ImageDigest):
		return fmt.Sprintf("%q is no image digest", d.ImageDigest)
	}
	return ""
}

func checkDevices(d *Desired, excluded []string) string {
	seen := map[string]bool{}
	for _, g := range d.Devices {
		switch {
		case seen[g.ID]:
			return "device " + g.ID + " is named twice"
		case g.Simulated != strings.HasPrefix(g.ID, "SIM-"):
			return fmt.Sprintf("device %q is not what it is said to be: simulated ones, and only they, begin with SIM-", g.ID)
		case !g.Simulated && !strings.HasPrefix(g.ID, "GPU-") && !strings.HasPrefix(g.ID, "MIG-"),
			strings.ContainsAny(g.ID, ", \t\r\n\x00="), len(g.ID) > 128:
			return fmt.Sprintf("%q is no device id", g.ID)
		case slices.Contains(excluded, g.ID):
			return "device " + g.ID + " was taken out of use by an admin"
		}
		seen[g.ID] = true
	}
	return ""
}

func checkEnv(env map[string]string) string {
	size := 0
	for name, value := range env {
		size += len(name) + len(value) + 2
		switch {
		case name == "" || strings.ContainsAny(name, "= \t\r\n\x00"):
			return fmt.Sprintf("%q is no name of an environment variable", name)
		case reservedEnv(name):
			return fmt.Sprintf("the environment variable %s is set by Carrel alone; leave it out", name)
		case strings.ContainsRune(value, 0):
			return fmt.Sprintf("the environment variable %s has a NUL byte in it", name)
		}
	}
	if size > maxEnv {
		return fmt.Sprintf("the environment has %d bytes, more than %d", size, maxEnv)
	}
	return ""
}

func (h *Host) refuseMounts(d *Desired) string {
	targets := map[string]bool{}
	for _, m := range d.Mounts {
		name := m.Name
		if name == "" {
			name = m.Volume + m.HostPath
		}
		if why := forbiddenTarget(m.Target); why != "" {
			return fmt.Sprintf("mount %s: %q inside the workspace %s", name, m.Target, why)
		}
		if targets[m.Target] {
			return fmt.Sprintf("mount %s: %s inside the workspace is named twice", name, m.Target)
		}
		targets[m.Target] = true
		switch {
		case (m.Volume == "") == (m.HostPath == ""):
			return fmt.Sprintf("mount %s: it is neither a volume nor a host path", name)
		case m.Volume != "" && !volumeID.MatchString(m.Volume):
			return fmt.Sprintf("mount %s: %q is no volume id", name, m.Volume)
		case m.HostPath != "":
			if why := h.opts.Policy.hostPath(m, d.Sudo, h.opts.DataDir); why != "" {
				return fmt.Sprintf("mount %s: %s", name, why)
			}
		}
	}
	return ""
}

// hostName follows RFC 1123 for one label.
func hostName(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	return !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-'
	})
}

// CheckOwner refuses a policy file that others than root could have written.
func CheckOwner(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	uid, ok := ownerOf(info)
	switch {
	case !info.Mode().IsRegular():
		return errors.New(path + " is not a regular file")
	case !ok || uid != 0 || info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s must belong to root and be writable by root alone: chown root %s && chmod go-w %s", path, path, path)
	}
	return nil
}
