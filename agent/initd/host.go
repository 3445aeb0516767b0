package initd

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"golang.org/x/crypto/ssh"

	"github.com/carrel-dev/carrel/agent/initd/account"
)

// host is what the agent has said this workspace is. The private host key is here and nowhere else inside the container.
type host struct {
	image []string // the image's environment

	mu         sync.Mutex
	version    int64
	cfg        *configuration // nil until the first Configure
	configured chan struct{}  // closed then
	reason     string
}

// configuration is one Configure, checked.
type configuration struct {
	version int64
	user    account.User
	sudo    bool
	env     map[string]string
	signer  ssh.Signer
	cert    *ssh.Certificate
	keys    []ssh.PublicKey
}

var errNotConfigured = errors.New("the agent has not said yet what this workspace is")

func newHost(image []string) *host { return &host{image: image, configured: make(chan struct{})} }

// accepts refuses a version below the one in force.
func (h *host) accepts(version int64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if version < h.version {
		return fmt.Errorf("configuration version %d is older than %d, which is in force", version, h.version)
	}
	return nil
}

func (h *host) set(cfg *configuration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.cfg == nil {
		close(h.configured)
	}
	h.version, h.cfg = cfg.version, cfg
}

func (h *host) current() (*configuration, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.cfg == nil {
		return nil, errNotConfigured
	}
	return h.cfg, nil
}

func (h *host) setStopReason(reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reason = reason
}

// stopReason is what sessions are told when the workspace stops.
func (h *host) stopReason() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.reason == "" {
		return "workspace stopped"
	}
	return "workspace stopped: " + h.reason
}

// sign signs with the host key, waiting for it when serve has just started again.
func (h *host) sign(ctx context.Context, data []byte, algorithm string) (*ssh.Signature, error) {
	select {
	case <-h.configured:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	cfg, err := h.current()
	if err != nil {
		return nil, err
	}
	if algorithm == "" {
		return cfg.signer.Sign(rand.Reader, data)
	}
	signer, ok := cfg.signer.(ssh.AlgorithmSigner)
	if !ok {
		return nil, fmt.Errorf("host key cannot sign as %s", algorithm)
	}
	return signer.SignWithAlgorithm(rand.Reader, data, algorithm)
}

// environ is what every session starts from: the image's ENV, then the agent's variables over it. Names that only the agent
// may give are dropped from the image's.
func (h *host) environ(cfg *configuration) []string {
	env := slices.DeleteFunc(slices.Clone(h.image), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		_, ours := cfg.env[name]
		return ours || name == "HOME" || name == "HOSTNAME"
	})
	names := make([]string, 0, len(cfg.env))
	for name := range cfg.env {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		env = append(env, name+"="+cfg.env[name])
	}
	return env
}
