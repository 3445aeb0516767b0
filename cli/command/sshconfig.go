package command

import (
	"context"
	"reflect"

	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/config"
	"github.com/carrel-dev/carrel/cli/sshconfig"
	"github.com/carrel-dev/carrel/cli/wholefile"
)

type sshConfigOptions struct {
	options []string
	given   bool
	clear   bool
	remove  bool
	print   bool
}

func newSSHConfig(a *app) *cobra.Command {
	o := sshConfigOptions{}
	cmd := &cobra.Command{
		Use:   "ssh-config",
		Short: "Make `ssh NAME.carrel` work: write the managed hosts and include them from your ssh configuration",
		Long: `Writes one Host block for each workspace into a file of its own, and one Include line at the very top of the
configuration that ssh reads (of your home as the user database has it); nothing else in that file changes.
Options given here replace those of an earlier run; a run without any keeps them (--no-ssh-options drops them).
Every verb that learns your workspaces refreshes the managed file.`,
		Example: `  carrel ssh-config --ssh-option 'RemoteForward 7001 127.0.0.1:7001' --ssh-option 'SendEnv LANG'`,
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.given = cmd.Flags().Changed("ssh-option")
			return a.sshConfig(cmd.Context(), o)
		},
	}
	cmd.Flags().StringArrayVar(&o.options, "ssh-option", nil, "`'KEYWORD VALUE'` for every workspace; may be given many times")
	cmd.Flags().BoolVar(&o.clear, "no-ssh-options", false, "drop the options of earlier runs")
	cmd.Flags().BoolVar(&o.remove, "remove", false, "take the Include line out again and empty the managed file")
	cmd.Flags().BoolVarP(&o.print, "print", "n", false, "print what the managed file would hold, change nothing")
	return cmd
}

func (a *app) sshConfig(ctx context.Context, o sshConfigOptions) error {
	if err := a.load(); err != nil {
		return err
	}
	if o.remove {
		return a.removeSSH(ctx)
	}
	lines := make([]string, 0, len(o.options))
	for _, option := range o.options {
		line, err := sshconfig.CheckOption(option)
		if err != nil {
			return usagef("%v", err)
		}
		lines = append(lines, line)
	}
	api, err := a.connect()
	if err != nil {
		return err
	}
	if !api.dep.Stored() {
		return failf(exitSignIn, "%v", errNoSSHWithoutLogin)
	}
	if o.print {
		return a.printSSH()
	}
	if o.given || o.clear {
		if err := a.saveSSHOptions(ctx, api.dep, lines); err != nil {
			return err
		}
	}
	if err := a.installSSH(ctx, api.dep); err != nil {
		return err
	}
	return a.listSSH()
}

// printSSH prints what the managed file would hold.
func (a *app) printSSH() error {
	_, content, _, err := a.renderSSH()
	if err != nil {
		return err
	}
	_, err = a.sys.Out.Write(content)
	return err
}

// listSSH prints the names that ssh knows now.
func (a *app) listSSH() error {
	entries, _, _, err := a.renderSSH()
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := a.print("%s", e.Alias); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) saveSSHOptions(ctx context.Context, dep config.Deployment, lines []string) error {
	unlock, err := wholefile.Lock(ctx, a.dir.Lock())
	if err != nil {
		return err
	}
	defer unlock()
	if dep, err = a.dir.Load(dep.Name); err != nil {
		return err
	}
	if reflect.DeepEqual(dep.SSHOptions, lines) {
		return nil
	}
	dep.SSHOptions = lines
	return dep.Save()
}

func (a *app) removeSSH(ctx context.Context) error {
	place, err := a.place()
	if err != nil {
		return err
	}
	changed, err := place.Uninstall(ctx)
	if err != nil {
		return err
	}
	if changed {
		a.say("%s: the Include line is gone; all else is as it was", place.User)
	}
	content, err := sshconfig.Render(nil, nil, false)
	if err != nil {
		return err
	}
	_, err = place.WriteManaged(ctx, content)
	return err
}
