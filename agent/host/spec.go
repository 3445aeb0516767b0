package host

import (
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

var digestPattern = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// environment is what every process of a run gets beside the image's own, which it wins over. What a run may see of GPUs is
// always said, so that an image's NVIDIA_VISIBLE_DEVICES never stands.
func environment(d *Desired) map[string]string {
	env := maps.Clone(d.Env)
	if env == nil {
		env = map[string]string{}
	}
	var all, real []string
	for _, g := range d.Devices {
		all = append(all, g.ID)
		if !g.Simulated {
			real = append(real, g.ID)
		}
	}
	env["NVIDIA_VISIBLE_DEVICES"] = "void" // libnvidia-container's word for none
	if len(real) > 0 {
		env["NVIDIA_VISIBLE_DEVICES"] = strings.Join(real, ",")
		env["NVIDIA_DRIVER_CAPABILITIES"] = "compute,utility,video,graphics"
	}
	env["CARREL_WORKSPACE"] = d.Name
	env["CARREL_WORKSPACE_ID"] = d.Key.Workspace
	env["CARREL_OWNER"] = d.Owner
	env["CARREL_PROJECT"] = d.Project
	env["CARREL_POOL"] = d.Pool
	env["CARREL_DEVICES"] = strings.Join(all, ",")
	env["CARREL_GPU_COUNT"] = strconv.Itoa(len(all))
	env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID" // the order of nvidia-smi
	return env
}

// VolumeName is the name under which the engine knows a volume of ours.
func VolumeName(id string) string { return "carrel-" + id }

// spec is the container of a run.
func (h *Host) spec(d *Desired, image Image, linkDir string) Spec {
	env := environment(d)
	s := Spec{
		Key: d.Key, Image: image.ID, Hostname: d.Name, LinkDir: linkDir, InitFile: h.opts.InitFile,
		Labels:    h.opts.Signer.Labels(d.Key, d.Devices, d.Mounts),
		CPUMillis: d.CPUMillis, MemoryMiB: d.MemoryMiB, ShmMiB: d.ShmMiB, Pids: d.PidsLimit, Sudo: d.Sudo, Stop: d.StopGrace,
	}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		s.Env = append(s.Env, name+"="+env[name])
	}
	for _, g := range d.Devices {
		if !g.Simulated {
			s.GPUs = append(s.GPUs, g.ID)
		}
	}
	for _, m := range d.Mounts {
		sm := SpecMount{HostPath: m.HostPath, Target: m.Target, ReadOnly: m.ReadOnly}
		if m.Volume != "" {
			sm.Volume = VolumeName(m.Volume)
		}
		s.Mounts = append(s.Mounts, sm)
	}
	return s
}

// writes lists the volumes that a run can write.
func writes(d *Desired) []string {
	var out []string
	for _, m := range d.Mounts {
		if m.Volume != "" && !m.ReadOnly {
			out = append(out, m.Volume)
		}
	}
	return out
}

// insideConfig is what carrel-init is told about a run.
func insideConfig(d *Desired) InsideConfig {
	return InsideConfig{
		Identity: d.Identity, Home: "/home/" + d.Identity.Login, Sudo: d.Sudo, SSH: d.SSH,
		Env: environment(d), Hostname: d.Name,
	}
}
