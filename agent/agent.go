// Package agent runs one GPU host: it wires the container engine, the devices, carrel-init's links and the gateway together.
package agent

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/carrel-dev/carrel/agent/config"
	"github.com/carrel-dev/carrel/agent/docker"
	"github.com/carrel-dev/carrel/agent/gpu"
	"github.com/carrel-dev/carrel/agent/host"
	"github.com/carrel-dev/carrel/agent/initlink"
	"github.com/carrel-dev/carrel/agent/link"
	"github.com/carrel-dev/carrel/agent/nvml"
	"github.com/carrel-dev/carrel/agent/nvml/healthfile"
	"github.com/carrel-dev/carrel/agent/nvml/procfs"
)

// Options of an agent.
type Options struct {
	Config   config.Config
	Identity Identity // joined: with host id and gateway
	Version  string
	Log      *slog.Logger
	// InitFile is carrel-init where the settings name none.
	InitFile string
}

// Agent is one host's agent.
type Agent struct {
	opts   Options
	log    *slog.Logger
	engine *docker.Client
	links  *initlink.Links
	gpus   *sources
	host   *host.Host
	link   *link.Link
}

// New prepares an agent: all that can be wrong with the host's files is found here, and nothing is started.
func New(ctx context.Context, o Options) (*Agent, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Identity.HostID == "" || o.Identity.Gateway == "" {
		return nil, errors.New("this host has joined no gateway; run `carreld agent --join TOKEN` with a token of `carrel host token`")
	}
	if !o.Config.DangerousPlainHTTP {
		if err := link.CheckGateway(o.Identity.Gateway); err != nil {
			return nil, err
		}
	}
	a := &Agent{opts: o, log: o.Log}
	if err := a.build(ctx); err != nil {
		return nil, errors.Join(err, a.close())
	}
	return a, nil
}

func (a *Agent) build(ctx context.Context) error {
	c := a.opts.Config
	policy, err := config.Policy(c.PolicyFile, c.PolicyNamed)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(c.DataDir, 0o700); err != nil {
		return fmt.Errorf("make the agent's data directory: %w", err)
	}
	initFile, err := installInit(a.initFile(), c.DataDir)
	if err != nil {
		return err
	}
	key, err := labelKey(c.DataDir)
	if err != nil {
		return err
	}
	signer, err := host.NewSigner(a.opts.Identity.HostID, key)
	if err != nil {
		return err
	}
	a.engine, err = docker.New(docker.Options{
		Host: c.EngineHost, Network: c.EngineNetwork, Call: c.EngineCallTimeout, Slow: c.EngineSlow, NoFile: int64(c.OpenFiles),
		Logs: docker.LogOptions{MaxSize: c.EngineLogSize, MaxFile: c.EngineLogFiles},
	})
	if err != nil {
		return err
	}
	a.links, err = initlink.New(initlink.Options{Dir: filepath.Join(c.DataDir, "links"), Log: a.log.With("part", "initlink")})
	if err != nil {
		return err
	}
	clock, err := host.SystemClock()
	if err != nil {
		return err
	}
	journal, err := host.OpenJournal(c.DataDir, clock.Now())
	if err != nil {
		return err
	}
	if a.gpus, err = openGPUs(ctx, c, a.opts.Identity.HostID, a.log); err != nil {
		return err
	}
	a.host, err = host.New(host.Options{
		DataDir: c.DataDir, InitFile: initFile, Version: a.opts.Version, Policy: policy, Signer: signer, Log: a.log,
		Times: host.Times{List: c.List, Heartbeat: c.Heartbeat, Facts: c.Facts, Ready: c.Ready, Stall: c.PullStall},
	}, host.Parts{Runtime: a.engine, GPUs: a.gpus, Inside: inside{links: a.links, log: a.log}, Clock: clock, Journal: journal})
	if err != nil {
		return err
	}
	a.gpus.host = a.host
	return a.dialer()
}

// dialer sets up the way to the gateway.
func (a *Agent) dialer() error {
	c, id := a.opts.Config, a.opts.Identity
	verify, err := id.TLS()
	if err != nil {
		return err
	}
	prover := link.NewProver(link.Prover{HostID: id.HostID, Key: id.Key, Started: time.Now(), Gateway: id.Gateway, TLS: verify})
	service := &link.HostService{Machine: a.host, DialBackFunc: func(n int) error { return a.link.DialBack(n) }}
	carrier := streams{links: a.links, write: c.Write, log: a.log}
	a.link = link.New(link.Options{
		GatewayURL: id.Gateway, TLS: verify, Proxy: http.ProxyFromEnvironment, Header: prover.Header, OnLink: prover.OnLink,
		Handler: service.Handler(), OnStream: carrier.carry, Streams: c.LinkStreams, MaxBackoff: c.LinkBackoff, DialTimeout: c.LinkDialTimeout,
		Log: a.log.With("part", "link"),
	})
	return nil
}

// Run works until ctx ends, or until the gateway wants this host no more. Containers go on.
func (a *Agent) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return a.host.Run(ctx) })
	group.Go(func() error { return a.link.Run(ctx) })
	err := group.Wait()
	if cause := context.Cause(ctx); errors.Is(err, context.Canceled) || cause != nil && errors.Is(err, cause) {
		if !errors.Is(err, link.ErrRefused) && !errors.Is(err, link.ErrNewerSession) {
			err = nil // it was asked to end
		}
	}
	return errors.Join(err, a.close())
}

// State tells how the link to the gateway is.
func (a *Agent) State() link.State { return a.link.State() }

func (a *Agent) close() error {
	var errs []error
	if a.links != nil {
		errs = append(errs, a.links.Close())
	}
	if a.gpus != nil {
		errs = append(errs, a.gpus.Close())
	}
	if a.engine != nil {
		errs = append(errs, a.engine.Close())
	}
	return errors.Join(errs...)
}

func (a *Agent) initFile() string {
	if a.opts.Config.InitFile != "" {
		return a.opts.Config.InitFile
	}
	if a.opts.InitFile != "" {
		return a.opts.InitFile
	}
	self, err := os.Executable()
	if err != nil {
		return "carrel-init"
	}
	return filepath.Join(filepath.Dir(self), "carrel-init")
}

// installInit copies carrel-init into a directory named by its hash, where it stays: containers that run keep the one that
// they were started with.
func installInit(from, dataDir string) (string, error) {
	program, err := os.ReadFile(from)
	if err != nil {
		return "", fmt.Errorf("carrel-init lies beside carreld, or where init_file says: %w", err)
	}
	dir := filepath.Join(dataDir, "init", fmt.Sprintf("%x", sha256.Sum256(program)))
	path := filepath.Join(dir, "carrel-init")
	if have, err := os.ReadFile(path); err == nil && sha256.Sum256(have) == sha256.Sum256(program) {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("install carrel-init: %w", err)
	}
	if err := host.WriteDurably(path, program, 0o555); err != nil {
		return "", fmt.Errorf("install carrel-init: %w", err)
	}
	return path, nil
}

// sources is the host's devices. What is ours on them is known by the host, which is made after them.
type sources struct {
	gpu.Source
	base gpu.Source
	host *host.Host // set before anything asks
}

// Close gives the driver back.
func (s *sources) Close() error { return s.base.Close() }

// driverVersion is there whenever the NVIDIA kernel driver is loaded.
const driverVersion = "/proc/driver/nvidia/version"

func openGPUs(ctx context.Context, c config.Config, hostID string, log *slog.Logger) (*sources, error) {
	s := &sources{}
	real := false
	list, simulated := strings.CutPrefix(c.GPUs, "simulated:")
	switch {
	case simulated:
		base, err := gpu.Simulated(gpu.SimulatedConfig{Host: hostID, Spec: list, Now: time.Now, Load: func(id string, at time.Time) (gpu.Load, bool) {
			return gpu.Wave(id, at), s.host.DeviceHeld(id)
		}})
		if err != nil {
			return nil, err
		}
		s.base = base
	case c.GPUs == "none":
		s.base = gpu.Null("GPUs are switched off in the agent's settings")
	default:
		s.base, real = nvml.New(nvml.Config{Library: c.NVMLLibrary, Limit: c.NVMLTimeout, Now: time.Now}), true
		if _, err := os.Stat(driverVersion); c.GPUs == "auto" && err != nil {
			inv, err := s.base.Inventory(ctx)
			if err != nil {
				return nil, err
			}
			if inv.Problem != "" && len(inv.Devices) == 0 {
				s.base, real = gpu.Null("no NVIDIA driver on this host: "+inv.Problem), false
			}
		}
	}
	stack := gpu.StackConfig{
		InventoryTTL: c.GPUInventoryAge, Now: time.Now, RuleOf: func(id string) gpu.Rule {
			if s.host.Excluded(id) {
				return gpu.RuleExclude
			}
			return gpu.RuleNone
		},
		Health: gpu.HealthConfig{Proof: c.GPUProof, OnSaveError: func(err error) { log.Warn("device health is not on disk", "error", err) }},
	}
	if real {
		stack.Health.Store = healthfile.New(filepath.Join(c.DataDir, "devices.json"))
		stack.OwnerOf = gpu.OwnersByContainer(procfs.New("/proc"), func(id string) (string, bool) { return s.host.RunOfContainer(id) })
	}
	_, top, err := gpu.Stack(s.base, stack)
	if err != nil {
		return nil, err
	}
	s.Source = top
	return s, nil
}
