package gateway

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/event"
	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/rpc"
)

// watchKeepAlive is how often a silent Watch stream shows that it lives, as WatchResponse promises.
const watchKeepAlive = 15 * time.Second

// readiness is whether the gateway takes calls.
type readiness struct{ ok atomic.Bool }

func (r *readiness) set(ok bool) { r.ok.Store(ok) }

// watcher gives the broker's Each the gateway's keep-alive.
type watcher struct{ events *event.Broker }

func (w watcher) Each(ctx context.Context, filter event.Filter, send func() error) error {
	return w.events.Each(ctx, filter, watchKeepAlive, send)
}

// routes returns all that the public port serves.
func (g *Gateway) routes() http.Handler {
	mux := http.NewServeMux()
	g.registerAPI(mux)
	door := &hostDoor{hosts: g.db, sessions: g.lifecycle, challenges: g.challenges, tunnel: g.tunnel, now: g.now, log: g.log, tokens: map[fleet.HostID]streamToken{}, agents: map[fleet.HostID]agentLink{}}
	door.register(mux)
	users := &userDoor{users: g.db, workspaces: g.db, tickets: g.tickets, tunnel: g.tunnel, now: g.now, log: g.log}
	users.register(mux)
	f := &files{dir: g.cliDir(), base: g.BaseURL, ca: g.CAPEM()}
	f.register(mux)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", g.serveReady)
	return mux
}

func (g *Gateway) serveReady(w http.ResponseWriter, _ *http.Request) {
	if err := g.db.Failed(); err != nil {
		http.Error(w, "the database cannot be used; the gateway's log has the cause", http.StatusServiceUnavailable)
		return
	}
	if !g.ready.ok.Load() {
		http.Error(w, "not taking calls", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

// cliDir returns where the served CLI binaries lie: beside carreld, unless the settings say otherwise.
func (g *Gateway) cliDir() string {
	if g.cfg.CLIDir != "" {
		return g.cfg.CLIDir
	}
	exe, err := os.Executable()
	if err != nil {
		return "cli"
	}
	return filepath.Join(filepath.Dir(exe), "cli")
}

// registerAPI mounts every service behind the gate.
func (g *Gateway) registerAPI(mux *http.ServeMux) {
	opts := []connect.HandlerOption{connect.WithInterceptors(g.gate), connect.WithReadMaxBytes(maxMessageBytes)}
	w := watcher{events: g.events}
	streams := closer{g}
	orders := hostOrders{g}
	mux.Handle(carrelv1connect.NewAuthServiceHandler(&rpc.Auth{
		Store: g.db, Streams: streams, Keys: g.lifecycle, Now: g.now, TokenLife: g.cfg.TokenLife, Version: g.version, Deployment: g.cfg.Deployment,
	}, opts...))
	mux.Handle(carrelv1connect.NewUserServiceHandler(&rpc.Users{
		Store: g.db, Streams: streams, Changed: g.userChanged, Now: g.now, SignInLife: g.cfg.SignInLife, SignInLink: g.signInLink,
	}, opts...))
	mux.Handle(carrelv1connect.NewAttachServiceHandler(&rpc.Attach{
		Store: g.db, Tickets: g.tickets, Links: g.lifecycle, HostCA: func() []string { return []string{g.hostCA.PublicKey()} }, Deployment: g.cfg.Deployment, Now: g.now,
	}, opts...))
	mux.Handle(carrelv1connect.NewWorkspaceServiceHandler(&rpc.Workspaces{
		Store: g.db, Orders: g.lifecycle, Progress: g.lifecycle, Watcher: w, LogLines: hostLogs{g.hosts},
	}, opts...))
	mux.Handle(carrelv1connect.NewHostServiceHandler(&rpc.Hosts{
		Store: g.db, Links: g.lifecycle, Orders: orders, Watcher: w, Now: g.now, JoinLife: g.cfg.JoinLife, JoinText: g.joinText, Challenges: g.challenges,
	}, opts...))
	mux.Handle(carrelv1connect.NewDeviceServiceHandler(&rpc.Devices{
		Store: g.db, Samples: g.lifecycle, Links: g.lifecycle, Names: names{g}, Orders: orders, Watcher: w, Now: g.now,
	}, opts...))
	mux.Handle(carrelv1connect.NewPoolServiceHandler(&rpc.Pools{
		Store: g.db, Links: g.lifecycle, Orders: orders, Watcher: w, Queued: g.queued,
	}, opts...))
	mux.Handle(carrelv1connect.NewImageServiceHandler(&rpc.Images{Store: g.db, Resolver: g.lifecycle, Allow: g.cfg.ImagesAllow, Now: g.now}, opts...))
	mux.Handle(carrelv1connect.NewVolumeServiceHandler(&rpc.Volumes{Store: g.db, Declared: g.cfg.Mounts, Now: g.now}, opts...))
	mux.Handle(carrelv1connect.NewUsageServiceHandler(&rpc.Usage{Store: g.db, Now: g.now}, opts...))
}

// joinText makes the text of a join token.
func (g *Gateway) joinText(secret string) string {
	return auth.JoinToken{Gateway: g.BaseURL(), Secret: secret, CA: g.caFingerprint()}.Encode()
}

// userChanged carries an account's change to what runs: streaming calls begin anew with what the user may see now, hosts learn of keys
// and identity.
func (g *Gateway) userChanged(ctx context.Context, user fleet.User) {
	g.gate.CloseUser(string(user.ID), fleet.Errorf(fleet.KindUnavailable, "the account %s was changed; try again", user.Name))
	if err := g.lifecycle.KeysChanged(ctx, user.ID); err != nil {
		g.log.Warn("hosts were not told of a changed user", "user", user.Name, "error", err)
	}
	g.lifecycle.Replan()
}

// queued counts the waiting workspaces of each pool.
func (g *Gateway) queued(ctx context.Context) (map[string]int, error) {
	counts := map[string]int{}
	for after := ""; ; {
		page, next, err := g.db.Workspaces(ctx, fleet.WorkspaceFilter{Limit: 1000, After: after})
		if err != nil {
			return nil, err
		}
		for _, w := range page {
			if w.State == fleet.StateQueued {
				counts[w.Spec.Pool]++
			}
		}
		if next == "" {
			return counts, nil
		}
		after = next
	}
}

// closer cuts byte streams and streaming calls with a reason for their users.
type closer struct{ g *Gateway }

func (c closer) CloseToken(token, reason string) {
	err := fleet.Errorf(fleet.KindUnauthenticated, "%s", reason)
	c.g.gate.CloseToken(token, err)
	c.g.tunnel.CloseToken(token, err)
}

func (c closer) CloseUser(user, reason string) {
	err := fleet.Errorf(fleet.KindUnauthenticated, "%s", reason)
	c.g.gate.CloseUser(user, err)
	c.g.tunnel.CloseUser(user, err)
}

// hostOrders is what an admin can do to hosts.
type hostOrders struct{ g *Gateway }

func (o hostOrders) Fence(ctx context.Context, host fleet.HostID, reason string) (int, error) {
	return o.g.lifecycle.Fence(ctx, host, reason)
}

func (o hostOrders) Replan() {
	o.g.lifecycle.Replan()
	o.g.events.DevicesChanged()
	o.g.events.PoolChanged("")
}

// names tells whose a run is.
type names struct{ g *Gateway }

func (n names) WorkspaceOwner(ctx context.Context, id fleet.WorkspaceID) (workspace, user string, ok bool) {
	w, err := n.g.db.Workspace(ctx, id)
	if err != nil {
		return "", "", false
	}
	return w.Name, strings.TrimSpace(w.OwnerName), true
}
