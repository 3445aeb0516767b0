package command

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"

	"connectrpc.com/connect"

	"github.com/carrel-dev/carrel/cli/config"
	"github.com/carrel-dev/carrel/cli/sshconfig"
	"github.com/carrel-dev/carrel/cli/wholefile"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

// place returns where the ssh files lie: beside the configuration that ssh reads, or the one of CARREL_SSH_CONFIG.
func (a *app) place() (sshconfig.Place, error) {
	dir, dirErr := a.sys.SSHDir()
	if file := a.sys.Getenv("CARREL_SSH_CONFIG"); file != "" {
		abs, err := filepath.Abs(file)
		if err != nil {
			return sshconfig.Place{}, err
		}
		return sshconfig.PlaceFor(abs, dir), nil
	}
	if dirErr != nil {
		return sshconfig.Place{}, dirErr
	}
	return sshconfig.PlaceFor(filepath.Join(dir, "config"), dir), nil
}

// sshDeployments reads what is known about all deployments, without asking any gateway.
func (a *app) sshDeployments() ([]sshconfig.Deployment, error) {
	names, err := a.dir.Deployments()
	if err != nil {
		return nil, err
	}
	first, err := a.dir.Default()
	if err != nil {
		return nil, err
	}
	exe, err := a.sys.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program's own path: %w", err)
	}
	var all []sshconfig.Deployment
	for _, name := range names {
		dep, err := a.dir.Load(name)
		if err != nil {
			return nil, err
		}
		all = append(all, sshDeployment(dep, exe, name == first))
	}
	return all, nil
}

func sshDeployment(dep config.Deployment, exe string, primary bool) sshconfig.Deployment {
	d := sshconfig.Deployment{
		Name:       dep.Name,
		Primary:    primary,
		ProxyArgv:  []string{exe, "proxy", "--config-dir", string(dep.Dir()), "--deployment", dep.Name},
		KnownHosts: dep.KnownHostsPath(),
		Identity:   dep.KeyPath(),
		CAKeys:     dep.HostCAKeys,
		Options:    dep.SSHOptions,
	}
	for _, h := range dep.Hosts {
		d.Hosts = append(d.Hosts, sshconfig.Host(h))
	}
	return d
}

// writeSSH writes the managed file and the known_hosts files from what is known, and returns all names in it.
func (a *app) writeSSH(ctx context.Context) ([]sshconfig.Entry, error) {
	entries, content, deployments, err := a.renderSSH()
	if err != nil {
		return nil, err
	}
	for _, d := range deployments {
		known, err := d.KnownHostsFile()
		if err != nil {
			return nil, err
		}
		if _, err := wholefile.Write(d.KnownHosts, known); err != nil {
			return nil, err
		}
	}
	place, err := a.place()
	if err != nil {
		return nil, err
	}
	_, err = place.WriteManaged(ctx, content)
	return entries, err
}

func (a *app) renderSSH() ([]sshconfig.Entry, []byte, []sshconfig.Deployment, error) {
	deployments, err := a.sshDeployments()
	if err != nil {
		return nil, nil, nil, err
	}
	place, err := a.place()
	if err != nil {
		return nil, nil, nil, err
	}
	names := place.Names()
	entries := sshconfig.Entries(deployments, func(alias string) bool { _, ok := names[alias]; return ok })
	content, err := sshconfig.Render(deployments, entries, runtime.GOOS == "windows")
	return entries, content, deployments, err
}

// learn takes what a gateway says about its workspaces into the deployment's record, and writes the ssh files. Nothing
// is kept of an answer that is malformed.
func (a *app) learn(ctx context.Context, dep config.Deployment, hosts []config.Host, caKeys []string) (config.Deployment, []sshconfig.Entry, error) {
	if !dep.Stored() {
		return dep, nil, nil
	}
	unlock, err := wholefile.Lock(ctx, a.dir.Lock())
	if err != nil {
		return dep, nil, err
	}
	defer unlock()
	if dep, err = a.dir.Load(dep.Name); err != nil { // as it is now: another call may have changed it
		return dep, nil, err
	}
	old := dep
	dep.Hosts, dep.HostCAKeys = hosts, caKeys
	if caKeys == nil {
		dep.HostCAKeys = old.HostCAKeys
	}
	if err := sshDeployment(dep, "carrel", false).Check(); err != nil {
		return old, nil, failf(exitFailure, "gateway %s sent what must not stand in an ssh configuration: %v; the ssh files were left as they are", dep.Gateway, err)
	}
	if !reflect.DeepEqual(dep, old) {
		if err := dep.Save(); err != nil {
			return old, nil, err
		}
	}
	entries, err := a.writeSSH(ctx)
	return dep, entries, err
}

// refreshSSH asks the gateway for all workspaces of the caller and writes the ssh files.
func (a *app) refreshSSH(ctx context.Context, api *api) ([]sshconfig.Entry, error) {
	if !api.dep.Stored() {
		return nil, nil
	}
	resp, err := api.attach.SshConfig(ctx, connect.NewRequest(&carrelv1.SshConfigRequest{}))
	if err != nil {
		return nil, err
	}
	hosts := make([]config.Host, 0, len(resp.Msg.GetHosts()))
	for _, h := range resp.Msg.GetHosts() {
		hosts = append(hosts, config.Host{WorkspaceID: h.GetWorkspaceId(), Workspace: h.GetWorkspace(), Login: h.GetLogin(), Principal: h.GetPrincipal()})
	}
	keys := append([]string{}, resp.Msg.GetHostCaKeys()...)
	_, entries, err := a.learn(ctx, api.dep, hosts, keys)
	return entries, err
}

// refreshQuietly is refreshSSH after a verb that has done its own work: a failure is a notice.
func (a *app) refreshQuietly(ctx context.Context, api *api) []sshconfig.Entry {
	entries, err := a.refreshSSH(ctx, api)
	if err != nil {
		a.say("carrel: the ssh configuration was not refreshed: %s", message(err))
	}
	return entries
}

// learnFromList is the cheap refresh of `ls`, which has all of the caller's workspaces at hand.
func (a *app) learnFromList(ctx context.Context, api *api, list []*carrelv1.Workspace) {
	hosts := make([]config.Host, 0, len(list))
	for _, w := range list {
		if w.GetState() == carrelv1.WorkspaceState_WORKSPACE_STATE_DELETED {
			continue
		}
		hosts = append(hosts, config.Host{WorkspaceID: w.GetId(), Workspace: w.GetName(), Login: w.GetLogin(), Principal: w.GetSshPrincipal()})
	}
	if !api.dep.Stored() || reflect.DeepEqual(hosts, api.dep.Hosts) || len(api.dep.HostCAKeys) == 0 {
		return
	}
	if _, _, err := a.learn(ctx, api.dep, hosts, nil); err != nil {
		a.say("carrel: the ssh configuration was not refreshed: %s", message(err))
	}
}

// installSSH refreshes the files and puts the Include line into the person's configuration.
func (a *app) installSSH(ctx context.Context, dep config.Deployment) error {
	token, err := dep.Token()
	if err != nil {
		return err
	}
	api, err := a.newAPI(dep, token, a.settings.Timeout)
	if err != nil {
		return err
	}
	entries, err := a.refreshSSH(ctx, api)
	if err != nil {
		return err
	}
	place, err := a.place()
	if err != nil {
		return err
	}
	changed, err := place.Install(ctx)
	if err != nil {
		return notInstalled(place, err)
	}
	if changed {
		line, _ := place.IncludeLine()
		a.say("%s: `%s` stands at its top now", place.User, line)
	}
	a.sayClashes(place, entries)
	a.sayHowToCall(place)
	return nil
}

func notInstalled(place sshconfig.Place, err error) error {
	line, lineErr := place.IncludeLine()
	if lineErr != nil {
		return failf(exitFailure, "%v", lineErr)
	}
	return failf(exitFailure, "the ssh configuration was left as it is: %v; put `%s` at the top of %s yourself, or use `ssh -F %s NAME.carrel`", err, line, place.User, sshconfig.QuoteShell(place.Managed))
}

// sayClashes tells which names the person's own configuration has already.
func (a *app) sayClashes(place sshconfig.Place, entries []sshconfig.Entry) {
	names := place.Names()
	for _, e := range entries {
		short := e.Host.Workspace + sshconfig.Suffix
		if line, ok := names[short]; ok && e.Alias != short {
			a.say("%s has a host %s of its own (line %d), which stays; the workspace is %s", place.User, short, line, e.Alias)
		}
	}
}

// sayHowToCall tells what to add where ssh does not read the file by itself.
func (a *app) sayHowToCall(place sshconfig.Place) {
	if !place.Default {
		a.say("ssh does not read %s by itself: use `ssh -F %s NAME.carrel`", place.User, sshconfig.QuoteShell(place.User))
	}
}

// sshCommand is how a person reaches a workspace with plain ssh.
func (a *app) sshCommand(entries []sshconfig.Entry, w *carrelv1.Workspace, deployment string) string {
	for _, e := range entries {
		if e.Host.WorkspaceID != w.GetId() || e.Deployment != deployment {
			continue
		}
		place, err := a.place()
		if err != nil {
			break
		}
		included, err := place.Included()
		switch {
		case err != nil || !included:
			return "ssh -F " + sshconfig.QuoteShell(place.Managed) + " " + e.Alias
		case !place.Default:
			return "ssh -F " + sshconfig.QuoteShell(place.User) + " " + e.Alias
		default:
			return "ssh " + e.Alias
		}
	}
	return "carrel ssh " + w.GetName()
}

// findEntry returns the block of a workspace by name, id or unique prefix, among those of one deployment.
func findEntry(entries []sshconfig.Entry, deployment, ref string) (sshconfig.Entry, error) {
	var near []sshconfig.Entry
	for _, e := range entries {
		if e.Deployment != deployment {
			continue
		}
		if e.Host.Workspace == ref || e.Host.WorkspaceID == ref || e.Alias == ref {
			return e, nil
		}
		if ref != "" && (strings.HasPrefix(e.Host.Workspace, ref) || strings.HasPrefix(e.Host.WorkspaceID, ref)) {
			near = append(near, e)
		}
	}
	switch len(near) {
	case 0:
		return sshconfig.Entry{}, failf(exitNotFound, "no workspace %s; `carrel ls` shows yours", ref)
	case 1:
		return near[0], nil
	}
	names := make([]string, len(near))
	for i, e := range near {
		names[i] = e.Host.Workspace
	}
	return sshconfig.Entry{}, usagef("%s could be %s: write more of the name", ref, strings.Join(names, ", "))
}

var errNoSSHWithoutLogin = errors.New("ssh needs the key that `carrel login` makes; CARREL_TOKEN alone cannot open a workspace")
