package docker

import (
	"context"
	"fmt"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"

	"github.com/carrel-dev/carrel/agent/host"
)

// networkLabel marks what this client made that is no container.
const networkLabel = "dev.carrel.made"

// isolation is the bridge driver's option that keeps containers of one bridge apart.
const isolation = "com.docker.network.bridge.enable_icc"

// Info tells what the engine is.
func (c *Client) Info(ctx context.Context) (host.EngineInfo, error) {
	limits := c.engineLimits(ctx)
	ctx, cancel := c.call(ctx)
	defer cancel()
	got, err := c.api.Info(ctx)
	if err != nil {
		return host.EngineInfo{}, failed("ask the engine what it is", err)
	}
	version, err := c.api.ServerVersion(ctx)
	if err != nil {
		return host.EngineInfo{}, failed("ask the engine for its version", err)
	}
	info := host.EngineInfo{
		Version: got.ServerVersion, API: c.api.ClientVersion(), OS: got.OperatingSystem + ", Linux " + got.KernelVersion,
		Parts: map[string]string{}, CDI: len(got.CDISpecDirs) > 0, CPUs: got.NCPU, Memory: got.MemTotal, Warnings: limits.warnings,
	}
	for _, part := range version.Components {
		info.Parts[part.Name] = part.Version
	}
	if got.OSType != "linux" {
		info.Warnings = append(info.Warnings, fmt.Sprintf("the engine runs %s containers; only Linux works", got.OSType))
	}
	return info, nil
}

// ensureNetwork makes the bridge of all workspaces, on which they do not reach each other.
func (c *Client) ensureNetwork(ctx context.Context) error {
	c.network.Lock()
	defer c.network.Unlock()
	ctx, cancel := c.slow(ctx)
	defer cancel()
	got, err := c.api.NetworkInspect(ctx, c.opts.Network, network.InspectOptions{})
	if cerrdefs.IsNotFound(err) {
		_, err = c.api.NetworkCreate(ctx, c.opts.Network, network.CreateOptions{
			Driver:  "bridge",
			Options: map[string]string{isolation: "false"},
			Labels:  map[string]string{networkLabel: "network"},
		})
		if err == nil || cerrdefs.IsConflict(err) {
			got, err = c.api.NetworkInspect(ctx, c.opts.Network, network.InspectOptions{})
		}
	}
	switch {
	case err != nil:
		return failed("make network "+c.opts.Network, err)
	case got.Driver != "bridge" || got.Options[isolation] != "false":
		return host.Errorf(host.KindInternal, "the engine's network %s does not keep containers apart (%s is not false); an admin must remove it: docker network rm %s",
			c.opts.Network, isolation, c.opts.Network)
	}
	return nil
}

// EnsureVolume names a directory; see [host.Volumes].
func (c *Client) EnsureVolume(ctx context.Context, name, dir string) error {
	ctx, cancel := c.call(ctx)
	defer cancel()
	want := map[string]string{"type": "none", "o": "bind", "device": dir}
	got, err := c.api.VolumeCreate(ctx, volume.CreateOptions{
		Name: name, Driver: "local", DriverOpts: want, Labels: map[string]string{networkLabel: "volume"},
	})
	if err == nil && got.Options == nil {
		got, err = c.api.VolumeInspect(ctx, name)
	}
	if err != nil {
		return failed("name volume "+name, err)
	}
	for option, value := range want {
		if got.Options[option] != value {
			return host.Errorf(host.KindConflict, "the engine's volume %s stands for %q and not for %s; an admin must remove it: docker volume rm %s",
				name, got.Options["device"], dir, name)
		}
	}
	return nil
}

// RemoveVolume makes the engine forget a name.
func (c *Client) RemoveVolume(ctx context.Context, name string) error {
	ctx, cancel := c.call(ctx)
	defer cancel()
	err := c.api.VolumeRemove(ctx, name, false)
	if cerrdefs.IsNotFound(err) {
		return nil
	}
	return failed("forget volume "+name, err)
}
