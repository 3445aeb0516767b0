package docker

import (
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/strslice"
	"github.com/docker/go-units"

	"github.com/carrel-dev/carrel/agent/host"
)

// Where carrel-init and its link lie in a container; agent/initd looks for the link there.
const (
	initTarget = "/.carrel/carrel-init"
	linkTarget = "/run/carrel-agent"
)

// The capabilities that carrel-init needs to become the user, own the home and end what runs. Without sudo, sessions have
// none of them.
func initCapabilities() []string {
	return []string{"CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID"}
}

// What sudo, dpkg and an sshd inside need beside them (DESIGN D6; tried: with fewer they break).
func sudoCapabilities() []string {
	return []string{"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
}

// setting is what a container's form depends on beside the run.
type setting struct {
	network string
	logs    LogOptions
	gpu     gpuMode
	ulimits []*units.Ulimit
}

// create is a container as the engine is asked for it.
type create struct {
	Name   string
	Config *container.Config
	Host   *container.HostConfig
}

// form turns a run's spec into what the engine is asked for: all of it stands here and in what it calls.
func form(s host.Spec, set setting) create {
	no := false
	return create{
		Name: s.Key.Container(),
		Config: &container.Config{
			Hostname:    s.Hostname,
			User:        "0:0",
			Env:         s.Env,
			Image:       s.Image,
			WorkingDir:  "/",
			Entrypoint:  strslice.StrSlice{initTarget},
			Cmd:         strslice.StrSlice{"init", "--link", "unix:" + linkTarget + "/link.sock", "--grace", innerGrace(s.Stop).String()},
			Labels:      s.Labels,
			StopSignal:  "SIGTERM",
			StopTimeout: seconds(s.Stop),
			Healthcheck: &container.HealthConfig{Test: []string{"NONE"}},
		},
		Host: &container.HostConfig{
			NetworkMode:   container.NetworkMode(set.network),
			RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyDisabled}, // the agent alone starts containers
			LogConfig: container.LogConfig{Type: "local", Config: map[string]string{
				"max-size": set.logs.MaxSize, "max-file": strconv.Itoa(set.logs.MaxFile),
			}},
			CapDrop:     strslice.StrSlice{"ALL"},
			CapAdd:      capabilities(s.Sudo),
			SecurityOpt: securityOptions(s.Sudo),
			IpcMode:     container.IPCModePrivate,
			ShmSize:     s.ShmMiB << 20,
			Init:        &no,
			Mounts:      mounts(s),
			Resources: container.Resources{
				NanoCPUs:       s.CPUMillis * 1e6,
				Memory:         s.MemoryMiB << 20,
				MemorySwap:     s.MemoryMiB << 20, // memory and swap together: no swap
				PidsLimit:      &s.Pids,
				Ulimits:        set.ulimits,
				DeviceRequests: deviceRequests(s.GPUs, set.gpu),
			},
		},
	}
}

func capabilities(sudo bool) strslice.StrSlice {
	if sudo {
		return sudoCapabilities()
	}
	return initCapabilities()
}

func securityOptions(sudo bool) []string {
	if sudo {
		return nil // sudo needs setuid programs to work
	}
	return []string{"no-new-privileges:true"}
}

// deviceRequests asks for devices by UUID: by ids and never by count, one request for all.
func deviceRequests(ids []string, mode gpuMode) []container.DeviceRequest {
	if len(ids) == 0 {
		return nil
	}
	if mode == gpuByCDI {
		names := make([]string, 0, len(ids))
		for _, id := range ids {
			names = append(names, "nvidia.com/gpu="+id)
		}
		return []container.DeviceRequest{{Driver: "cdi", DeviceIDs: names}}
	}
	return []container.DeviceRequest{{DeviceIDs: ids, Capabilities: [][]string{{"gpu"}}}}
}

func mounts(s host.Spec) []mount.Mount {
	out := []mount.Mount{
		{Type: mount.TypeBind, Source: s.InitFile, Target: initTarget, ReadOnly: true},
		{Type: mount.TypeBind, Source: s.LinkDir, Target: linkTarget, ReadOnly: true},
	}
	for _, m := range s.Mounts {
		if m.Volume == "" {
			out = append(out, mount.Mount{Type: mount.TypeBind, Source: m.HostPath, Target: m.Target, ReadOnly: m.ReadOnly})
			continue
		}
		out = append(out, mount.Mount{
			Type: mount.TypeVolume, Source: m.Volume, Target: m.Target, ReadOnly: m.ReadOnly,
			// The engine would copy what the image has there, with its owner, into a new volume.
			VolumeOptions: &mount.VolumeOptions{NoCopy: true},
		})
	}
	return out
}

// seconds rounds up, since the engine counts whole ones.
func seconds(d time.Duration) *int {
	n := int(math.Ceil(d.Seconds()))
	return &n
}

// innerGrace ends a little before the engine's own limit, so that carrel-init ends what is inside and not the engine.
func innerGrace(stop time.Duration) time.Duration { return max(stop-stop/10, time.Second/2) }

// fullDisk finds ENOSPC in an engine's text: its API has no code for it.
func fullDisk(text string) bool { return strings.Contains(text, "no space left on device") }
