package gateway

import (
	"context"
	"crypto/ed25519"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/tunnel"
)

// Headers of an agent's connections (docs/protocol.md).
const (
	headerHost        = "Carrel-Host"
	headerNonce       = "Carrel-Nonce"
	headerProof       = "Carrel-Proof"
	headerStreamToken = "Carrel-Stream-Token"
	// headerInstance is the start time of the agent's process, UnixNano in decimal: of two with one identity, the one started last stays.
	headerInstance = "Carrel-Instance"
)

// hostDoor lets hosts in: it checks who they are and hands their connections to the tunnel.
type hostDoor struct {
	hosts interface {
		Host(ctx context.Context, idOrName string) (fleet.Host, error)
	}
	sessions interface {
		// BeginSession starts a new session of a host.
		BeginSession(ctx context.Context, host fleet.HostID) (int64, error)
	}
	challenges *auth.Challenges
	tunnel     *tunnel.Tunnel
	now        func() time.Time
	log        *slog.Logger

	mu     sync.Mutex
	tokens map[fleet.HostID]streamToken
	agents map[fleet.HostID]agentLink
}

// agentLink is the agent that a host is connected by.
type agentLink struct{ started, session int64 }

// streamToken lets a host's byte-stream connections in, in its present session.
type streamToken struct {
	hash    []byte
	session int64
}

func (d *hostDoor) register(mux *http.ServeMux) {
	mux.HandleFunc("GET /carrel/link", d.link)
	mux.HandleFunc("GET /carrel/stream", d.stream)
}

// link is the connection over which an agent serves HostService.
func (d *hostDoor) link(w http.ResponseWriter, r *http.Request) {
	host, err := d.prove(r)
	if err != nil {
		refuse(w, d.log, err)
		return
	}
	started, err := strconv.ParseInt(r.Header.Get(headerInstance), 10, 64)
	if err != nil {
		refuse(w, d.log, fleet.Errorf(fleet.KindInvalid, "the header %s must be the start time of the agent; give the agent this gateway's version", headerInstance))
		return
	}
	if d.older(host.ID, started) {
		d.refuseOlder(w, r, host)
		return
	}
	session, err := d.sessions.BeginSession(r.Context(), host.ID)
	if err != nil {
		refuse(w, d.log, err)
		return
	}
	token := auth.NewCode()
	if !d.enter(host.ID, started, streamToken{hash: token.Hash, session: session}) {
		d.refuseOlder(w, r, host)
		return
	}
	defer d.leave(host.ID, session)
	w.Header().Set(headerStreamToken, token.Text)
	d.log.Info("host connected", "host", host.Name, "session", session, "from", r.RemoteAddr)
	//nolint:contextcheck // the link outlives the request's context, which ends with the takeover of its connection
	err = d.tunnel.ServeLink(w, r, string(host.ID), session)
	d.log.Info("host disconnected", "host", host.Name, "session", session, "cause", err)
}

func (d *hostDoor) refuseOlder(w http.ResponseWriter, r *http.Request, host fleet.Host) {
	d.log.Warn("an older agent with the identity of a host was turned away", "host", host.Name, "from", r.RemoteAddr)
	refuse(w, d.log, fleet.Errorf(fleet.KindConflict, "another agent with the identity of host %s was started after this one; end one of the two", host.Name))
}

// older reports whether the host is connected by an agent that was started later. One that is not connected any more does not count: the
// clock by which it was started may have been set back since.
func (d *hostDoor) older(host fleet.HostID, started int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return started < d.agents[host].started
}

// enter makes an agent the one that its host is connected by, unless a later one came in meanwhile.
func (d *hostDoor) enter(host fleet.HostID, started int64, token streamToken) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if started < d.agents[host].started {
		return false
	}
	d.agents[host], d.tokens[host] = agentLink{started: started, session: token.session}, token
	return true
}

// leave forgets the agent of an ended session, unless another one has entered.
func (d *hostDoor) leave(host fleet.HostID, session int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.agents[host].session == session {
		delete(d.agents, host)
	}
}

// prove checks the host's signature over a nonce that it was given before.
func (d *hostDoor) prove(r *http.Request) (fleet.Host, error) {
	denied := fleet.Errorf(fleet.KindUnauthenticated, "the host's proof does not hold; if this host was set up anew, join it again with `carreld agent --join TOKEN`")
	nonce, err := base64.StdEncoding.DecodeString(r.Header.Get(headerNonce))
	if err != nil {
		return fleet.Host{}, denied
	}
	proof, err := base64.StdEncoding.DecodeString(r.Header.Get(headerProof))
	if err != nil {
		return fleet.Host{}, denied
	}
	id := r.Header.Get(headerHost)
	host, err := d.hosts.Host(r.Context(), id)
	if fleet.IsKind(err, fleet.KindNotFound) {
		return fleet.Host{}, denied
	}
	if err != nil {
		return fleet.Host{}, err
	}
	if string(host.ID) != id {
		return fleet.Host{}, denied // a name is no identity
	}
	return host, d.challenges.Verify(id, nonce, proof, ed25519.PublicKey(host.PublicKey), d.now())
}

// stream is a pre-dialled connection that will carry one byte stream.
func (d *hostDoor) stream(w http.ResponseWriter, r *http.Request) {
	id := fleet.HostID(r.Header.Get(headerHost))
	d.mu.Lock()
	token, ok := d.tokens[id]
	d.mu.Unlock()
	if !ok || subtle.ConstantTimeCompare(token.hash, auth.Hash(r.Header.Get(headerStreamToken))) != 1 {
		refuse(w, d.log, fleet.Errorf(fleet.KindUnauthenticated, "this connection belongs to no session of the host"))
		return
	}
	if err := d.tunnel.ServeStream(w, r, string(id), token.session); err != nil {
		d.log.Debug("byte stream connection refused", "host", id, "cause", err)
	}
}

// statuses is the table of kinds for plain HTTP answers.
var statuses = map[fleet.Kind]int{
	fleet.KindInvalid:         http.StatusBadRequest,
	fleet.KindUnauthenticated: http.StatusUnauthorized,
	fleet.KindForbidden:       http.StatusForbidden,
	fleet.KindNotFound:        http.StatusNotFound,
	fleet.KindExists:          http.StatusConflict,
	fleet.KindConflict:        http.StatusConflict,
	fleet.KindExhausted:       http.StatusTooManyRequests,
	fleet.KindUnavailable:     http.StatusServiceUnavailable,
	fleet.KindInternal:        http.StatusInternalServerError,
}

// refuse answers a request that asked for an upgrade with one plain line that says what to do.
func refuse(w http.ResponseWriter, log *slog.Logger, err error) {
	var e *fleet.Error
	if !errors.As(err, &e) || e.Kind == fleet.KindInternal || (e.Cause != nil && e.Cause.Error() != "") {
		log.Warn("connection refused", "error", err) // the cause goes no further than this
	}
	http.Error(w, fleet.UserMessage(err), statuses[fleet.KindOf(err)])
}
